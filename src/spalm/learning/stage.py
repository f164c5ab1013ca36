"""The stage of a model: an artifact that all ranks make together and the first one writes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spalm import artifact
from spalm.learning.checkpoint import FOLDER
from spalm.learning.ranks import Ranks


def training_stage(
    directory: Path,
    kind: str,
    version: int,
    settings: Mapping[str, Any],
    parents: Mapping[str, str],
    make: Callable[[Path], tuple[dict[str, Any], list[str]]],
    restart: bool,
    ranks: Ranks,
) -> None:
    """`artifact.stage` by the first rank; the others do not look at the folder, but are told whether there is work."""
    remedy = "start all with the same command, on the same files"
    ranks.same({"settings": settings, **parents}, f"data for {directory.name}", remedy)

    def make_together(draft: artifact.Draft) -> tuple[dict[str, Any], list[str]]:
        draft.scratch(FOLDER)
        ranks.tell(True)
        return make(draft.directory)

    if ranks.first:
        artifact.stage(directory, kind, version, settings, parents, make_together, restart)
        ranks.tell(False)
    else:
        while ranks.tell():
            make(directory)
