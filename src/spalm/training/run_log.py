"""The log of a training run: metrics.jsonl, one object a line, and TensorBoard on request."""

import json
from pathlib import Path
from typing import Any

from spalm.digests import refuse_changed
from spalm.errors import DamagedError, InputError
from spalm.files import child, read_text, validated, write_atomically

_FILE = "metrics.jsonl"


class RunLog:
    """Appends values by step. Reopened at a step, it removes what a killed run wrote beyond that step."""

    def __init__(self, directory: Path, step: int, *, tensorboard: bool = False):
        path = directory / _FILE
        lines = read_text(path).splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
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


def read_run_log(directory: Path) -> list[dict[str, Any]]:
    """Returns the lines of the log of a finished training run: values by name."""
    path, remedy = directory / _FILE, "restore it from a copy, or train the model again"
    if not path.exists():
        raise InputError(f"there is no {path}; {remedy}")
    refuse_changed(directory, [_FILE], remedy)
    try:
        lines = [json.loads(line) for line in read_text(child(directory, _FILE), remedy=remedy).splitlines()]
    except (ValueError, RecursionError):
        raise DamagedError(f"{path} is damaged (a line is no JSON); {remedy}") from None
    return validated(lines, list[dict[str, float | None]], path, remedy=remedy)


def _step_of(line: str) -> float:
    """Returns the step of a line; infinity if the line is incomplete."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut off in the middle by a kill


def _tensorboard(directory: Path) -> Any:
    """Returns a writer for TensorBoard, which is an extra."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory / "tensorboard")
