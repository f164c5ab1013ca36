"""The log of a training run: metrics.jsonl, one object a line, and TensorBoard on request."""

import json
from pathlib import Path
from typing import Any

from spalm.artifact import write_atomically


class RunLog:
    """Appends values by step. Reopened at a step, it removes what a killed run wrote beyond that step."""

    def __init__(self, directory: Path, step: int, *, tensorboard: bool = False):
        path = directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a")
        self._board = _tensorboard(directory) if tensorboard else None

    def write(self, step: int, **values: Any) -> None:
        """Appends named values of a step."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _step_of(line: str) -> float:
    """Returns the step of a line; infinity if the line is incomplete."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return float("inf")  # cut off in the middle by a kill


def _tensorboard(directory: Path) -> Any:
    """Returns a writer for TensorBoard, which is an extra."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory / "tensorboard")
