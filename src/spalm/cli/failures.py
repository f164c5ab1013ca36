"""Errors as lines for users: the one place where an exception becomes a message and an exit code."""

import errno
from typing import Any

import pydantic
import typer

from spalm.errors import InputError, first_line

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of errors for which there is no room to write."""
_OUT_OF_MEMORY = (
    *("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "bad alloc"),
    *("Storage size calculation overflowed", "array is too big", "Maximum allowed dimension exceeded"),
)
"""Parts of the messages of torch, faiss and numpy when an allocation fails; such errors have no class of their own."""


def explain(error: Exception) -> tuple[str | None, int]:
    """Returns the line that explains an error and the exit code; no line for an error that is a fault of spalm."""
    if isinstance(error, typer.TyperException):
        return _explain_usage(error), error.exit_code
    if isinstance(error, InputError):
        return str(error), 1
    if _is_out_of_memory(error):
        return _explain_memory(error), 1
    if isinstance(error, OSError):
        return _explain_system(error), 1
    if isinstance(error, UnicodeError):
        return f"a text is not UTF-8 ({first_line(error)}); convert it first", 1
    return None, 1


def _explain_usage(error: typer.TyperException) -> str:
    """Returns what is wrong with a command line: the option or argument, its value, and where help is."""
    parameter, cause, context = getattr(error, "param", None), error.__cause__, getattr(error, "ctx", None)
    command = "spalm" if context is None else context.command_path
    if parameter is not None and isinstance(cause, pydantic.ValidationError):
        problem = cause.errors()[0]
        reason = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should").rstrip(".")
        return f"{_name(parameter)} {problem['input']}: {reason}; see `{command} --help`"
    message = " ".join(error.format_message().split()).rstrip(".")
    end = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{end} `{command} --help`"


def _name(parameter: Any) -> str:
    """Returns an option or argument as users know it."""
    if parameter.param_type_name == "option":
        return max(parameter.opts, key=len)
    return parameter.get_error_hint().strip("'")


def _is_out_of_memory(error: Exception) -> bool:
    """Returns whether an allocation failed: on the CPU, on a GPU, or in a memory map."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError | ValueError) and any(part in str(error) for part in _OUT_OF_MEMORY)


def _explain_memory(error: Exception) -> str:
    """Returns a line about an allocation that failed."""
    reason = first_line(error).rpartition("can't allocate memory: ")[2]
    return f"out of memory ({reason}); give smaller settings, such as batch sizes and lengths, or use a larger machine"


def _explain_system(error: OSError) -> str:
    """Returns a line about an error of the operating system."""
    where = error.filename or "the output folder"
    reason = error.strerror or str(error)
    if error.errno in _FULL or "No space left" in reason:
        return f"no space left to write {where}; make room or choose another --out, then run the same command to go on"
    return f"{where}: {reason}"
