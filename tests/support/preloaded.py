"""Modules that a process loads once, from which commands are forked: the command line, and what it loads late."""

from contextlib import suppress

import scipy.stats  # noqa: F401
import torch._dynamo  # noqa: F401
from numba.core.registry import cpu_target

import spalm.api  # noqa: F401
import spalm.cli.verbs  # noqa: F401
import spalm.maintenance  # noqa: F401
import spalm.planning  # noqa: F401
import spalm.server  # noqa: F401

with suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
