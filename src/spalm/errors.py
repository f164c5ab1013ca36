"""Errors that a user can cause and correct."""


class InputError(ValueError):
    """Bad input: one line that names the value and the remedy. The command line shows it without a traceback."""


class InUseError(InputError):
    """Another process holds what is needed; the same may be tried again later."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
