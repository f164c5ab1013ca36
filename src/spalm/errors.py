"""Errors that a user can cause and correct."""


class InputError(ValueError):
    """Bad input. The message names the value and the remedy in one line; the CLI shows it without a traceback."""


class InUseError(InputError):
    """Another process is using a file or folder that is needed; the same command may succeed later."""


class DamagedError(InputError):
    """A file is not as it was written, or not of the form that it should have."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
