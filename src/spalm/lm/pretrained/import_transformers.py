"""The optional library transformers, imported when it is needed."""

from importlib import import_module
from typing import Any

from spalm.errors import InputError


def import_transformers() -> Any:
    """Imports transformers without its messages and progress bars; raises an error if it is not installed."""
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise InputError("pretrained models need the extra: pip install 'spalm[pretrained]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
