"""The stage of a model: an artifact that all ranks make together and the first one writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spalm.artifact import Draft, Stage
from spalm.compute import Execution
from spalm.training.checkpoint import FOLDER


def training_stage(
    stage: Stage,
    directory: Path,
    make: Callable[[Path], tuple[dict[str, Any], list[str]]],
    execution: Execution,
) -> None:
    """Has the first rank make a stage; the others do not look at the folder, but are told whether there is work."""
    ranks, remedy = execution.hardware.ranks, "start all with the same command, on the same files"
    ranks.refuse_unless_equal({"settings": stage.settings, **stage.parents}, f"data for {directory.name}", remedy)

    def fill_together(draft: Draft) -> tuple[dict[str, Any], list[str]]:
        draft.scratch(FOLDER)
        ranks.broadcast("there is work")
        return make(draft.directory)

    if ranks.is_first:
        stage.make(directory, fill_together, restart=execution.restart)
        ranks.broadcast(None)
    else:
        while ranks.broadcast():
            make(directory)
