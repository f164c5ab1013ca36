"""The command line: verbs in the order of the pipeline, each calling one function."""

import errno
import sys

from spalm.cli.options import app
from spalm.console import say
from spalm.errors import InputError

# isort: off
# The verbs, in the order in which `spalm --help` lists them.
from spalm.cli import pipeline
from spalm.cli import study
from spalm.cli import models
# isort: on

__all__ = ["app", "main", "models", "pipeline", "study"]

_STOPPED = 130
"""Exit code of a command that was stopped from the keyboard."""


def main() -> None:
    """Runs the `spalm` command; shows errors that a user can mend as one line, without a traceback."""
    try:
        app()
    except SystemExit as end:
        if end.code == _STOPPED:
            say("spalm: stopped; run the same command again to go on from here")
        raise
    except InputError as error:
        _fail(str(error))
    except OSError as error:
        _fail(_explain(error))


def _explain(error: OSError) -> str:
    """Returns an error of the operating system as a line for users."""
    where = error.filename or "the output folder"
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in reason:
        return f"no space left to write {where}; make room or choose another --out, then run the same command to go on"
    return f"{where}: {reason}"


def _fail(message: str) -> None:
    """Prints an error and ends the command."""
    say(f"spalm: {message}")
    sys.exit(1)
