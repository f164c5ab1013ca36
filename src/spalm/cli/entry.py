"""The entry point: runs a command, and ends it with one line and an exit code whatever goes wrong.

Only the standard library is imported before `main` runs, so that it catches Ctrl-C during all other imports.

Exit codes: 0 done, 1 refused or failed, 2 a command line that cannot be understood, 130 stopped from the keyboard,
141 nobody reads the output any more.
"""

import os
import signal
import sys
from typing import NoReturn

DONE, FAILED, USAGE, STOPPED, UNREAD = 0, 1, 2, 130, 141


def main() -> NoReturn:
    """Runs the `spalm` command with the arguments of this process, and ends the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command and returns its exit code."""
    try:
        from spalm.cli.streams import prepare_streams

        prepare_streams()
        return _invoke(arguments)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not interrupt the end
        return _end("stopped; run the same command again to go on from here", STOPPED)
    except BrokenPipeError:
        _discard_output()
        return UNREAD
    except Exception as error:
        from spalm.cli.failures import explain

        line, code = explain(error)
        if line is None:
            raise
        return _end(line, code)


def _invoke(arguments: list[str]) -> int:
    """Runs a command; what it raises says how it ended. Without arguments, it prints the help."""
    import typer

    from spalm.cli.streams import refuse_unless_unicode
    from spalm.cli.verbs import command

    refuse_unless_unicode(arguments)
    try:
        with command.make_context("spalm", arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    finally:
        sys.stdout.flush()
    return DONE


def _end(line: str, code: int) -> int:
    """Prints the reason for which a command ended; returns its exit code."""
    from spalm.console import say

    say(f"spalm: {line}")
    return code


def _discard_output() -> None:
    """Discards what is left to print, for which Python would report an error at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
