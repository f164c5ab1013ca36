"""Paths as users give them."""

from pathlib import Path

from spalm.errors import InputError, first_line


def user_path(path: Path | str) -> Path:
    """Returns a path with the home folder in place of ~; refuses the home of a user who does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: {first_line(error).rstrip('.').lower()}; give another path") from None


def resolved_path(path: Path | str) -> Path:
    """Returns the absolute path that a path stands for, without links; refuses links that lead in a circle."""
    try:
        return user_path(path).resolve()
    except (OSError, RuntimeError):
        raise InputError(f"{path}: its links lead in a circle; give another path") from None
