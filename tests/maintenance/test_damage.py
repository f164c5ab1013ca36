"""Commands that read damaged files: an error of one line, or an answer, and never a traceback."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from spalm.api import load
from spalm.artifact import MANIFEST, Artifact
from spalm.compute import Execution, Hardware
from spalm.digests import SUMS
from spalm.errors import InputError
from spalm.generation.inspection import CorpusPassage
from spalm.memory import Memory, describe_memory
from spalm.runs import FinishedRun
from spalm.study.registry import ANALYSES, make_request

EXECUTION = Execution(Hardware("cpu", 1))
FLIPS = 40


def use(folder: Path) -> None:
    """Does what the commands do that read most files."""
    for path in folder.rglob(MANIFEST):
        Artifact(path.parent)
    describe_memory(Memory(folder / "memory"))
    model = load(folder, execution=EXECUTION)
    model.generate("ka1 lo3", max_tokens=2, temperature=1.0, seed=1)
    model.explorer.passage(CorpusPassage("test", 0, 0, 9))
    if (folder / "results.json").exists():
        request = make_request(FinishedRun(folder), "test", "spalm")
        for name in ("outputs", "gates", "matches", "significance", "ablation", "curves"):
            ANALYSES[name](request)


def outcome(folder: Path) -> str:
    """What a command would say about damage, if it finds any."""
    try:
        use(folder)
    except (InputError, OSError) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("digests", [True, False], ids=["", "by an earlier version"])
@pytest.mark.parametrize("which", ["run", "attached"])
def test_a_flipped_bit_is_a_line_or_an_answer(which, digests, request, tmp_path):
    source = request.getfixturevalue("finished").directory if which == "run" else None
    folder = shutil.copytree(source or request.getfixturevalue("attached_folder"), tmp_path / which)
    use(folder)
    for path in [] if digests else list(folder.rglob(SUMS)):
        path.unlink()
    random = np.random.default_rng(5)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    for path in random.choice(np.array(files, object), FLIPS).tolist():
        if not path.exists():
            continue  # of an index that was made again
        good = bytearray(path.read_bytes())
        bad, place = bytearray(good), int(random.integers(min(len(good), 300)))
        bad[place] ^= 1 << int(random.integers(8))
        path.write_bytes(bad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of figures that are not finite
            said = outcome(folder)
        assert "\n" not in said, f"bit of byte {place} of {path}"
        path.write_bytes(good)
