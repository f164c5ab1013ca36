"""Errors that a user can cause, and so can mend."""


class InputError(ValueError):
    """Bad input: one line that names the value and the remedy. The command line shows it without a traceback."""
