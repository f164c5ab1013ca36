"""Errors that a user can cause, and so can mend."""


class InputError(ValueError):
    """Bad input: one line that names the value and the remedy. The command line shows it without a traceback."""


class InUse(InputError):
    """Another process holds what is needed: to be tried again later."""
