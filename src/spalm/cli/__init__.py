"""The command line: verbs in the order of the pipeline, each calling one function.

Modules of this package import no numerical library before a verb runs, so help and usage errors come at once.
"""

from spalm.cli.entry import main

__all__ = ["main"]
