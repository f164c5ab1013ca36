"""Folders of models, copied and changed by hand, and texts for the models in them."""

import json
import shutil
from pathlib import Path

TEXTS = ["ka1 lo3 mi4 .\nka2", "nu7", "lo3 mi11 ka5 .\n"]


def rewrite(path: Path, **changes) -> None:
    """Changes a JSON file by hand; whoever does so removes the digests beside it."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (path.parent / "SHA256SUMS").unlink(missing_ok=True)


def moved_in(folder: Path, to: Path) -> Path:
    """A copy by hand, with the base model beside it, that may be taken away."""
    copy = shutil.copytree(folder, to / folder.name)
    if (copy / "attached.json").exists():
        about = json.loads((copy / "attached.json").read_text())
        shutil.copytree(folder / about["model"], to / "base")
        rewrite(copy / "attached.json", model=str(to / "base"))
    return copy
