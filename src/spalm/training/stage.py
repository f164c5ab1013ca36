"""The stage of a trained model: an artifact that all ranks make together and the first one writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spalm.artifact import Draft, Stage
from spalm.compute import Execution
from spalm.training.checkpoint import CHECKPOINTS

_WORK = "there is work"
"""Value that the first rank broadcasts when the artifact is not there yet; None ends the stage."""


def run_training_stage(
    stage: Stage,
    directory: Path,
    make: Callable[[Path], tuple[dict[str, Any], list[str]]],
    *,
    execution: Execution,
) -> None:
    """Makes the artifact on all ranks, unless it is there already.

    Only the first rank looks at the folder; the others learn from it whether there is work.
    """
    ranks, remedy = execution.hardware.ranks, "start all with the same command, on the same files"
    ranks.refuse_unless_equal({"settings": stage.settings, **stage.parents}, f"data for {directory.name}", remedy)

    def fill(draft: Draft) -> tuple[dict[str, Any], list[str]]:
        draft.scratch(CHECKPOINTS)
        ranks.broadcast(_WORK)
        return make(draft.directory)

    if ranks.is_first:
        stage.make(directory, fill, restart=execution.restart)
        ranks.broadcast(None)
    else:
        while ranks.broadcast():
            make(directory)
