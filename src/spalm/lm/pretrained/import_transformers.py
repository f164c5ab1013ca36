"""The optional library transformers, imported when it is needed, and the one place where it opens what others made."""

from importlib import import_module
from pathlib import Path
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


def open_pretrained(kind: str, name: str | Path, **options: Any) -> Any:
    """Calls `from_pretrained` of one of the Auto classes, such that nothing of the model is ever run.

    Python files of the model are not imported, and nobody is asked whether they should be; weights are read as
    safetensors, not unpickled.
    """
    options |= {"trust_remote_code": False}
    if kind.startswith("AutoModel") and "gguf_file" not in options:
        options["use_safetensors"] = True
    return getattr(import_transformers(), kind).from_pretrained(name, **options)
