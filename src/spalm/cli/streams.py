"""Standard streams and arguments as a command needs them: open, and in UTF-8 whatever the locale."""

import io
import os
import sys

from spalm.errors import InputError

_OUTPUT = 1
"""Number of standard output among the files of a process."""


def prepare_streams() -> None:
    """Makes the standard streams usable; raises an error if there is no standard output.

    Files and pipes hold UTF-8. A terminal has the encoding of the locale, and what that lacks is shown as \\N escapes.
    A stream that is closed would give its number to the next file that is opened, into which libraries would then
    write their messages; it gets the null device instead.
    """
    closed = [number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is None]
    for number in closed:
        _open_null_device(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")
    if _OUTPUT in closed:
        raise InputError("standard output is closed; send it to a file, or to the null device")


def _open_null_device(number: int) -> None:
    """Opens the null device under the number of a standard stream."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


def refuse_unless_unicode(arguments: list[str]) -> None:
    """Raises an error for an argument that is not in the encoding of the locale, usually UTF-8."""
    for argument in arguments:
        if not argument.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in argument):
            raise InputError(f"{argument!r} is not {sys.getfilesystemencoding().upper()}; give it in that encoding")


def read_standard_input() -> str:
    """Returns the text on standard input; refuses one that is closed or not UTF-8."""
    if sys.stdin is None:
        raise InputError("- reads the text from standard input, which is closed; give the text itself")
    try:
        return sys.stdin.buffer.read().decode(sys.stdin.encoding if sys.stdin.isatty() else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 (byte {error.start:,}); convert it first") from None
