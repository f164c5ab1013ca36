"""What runs a pretrained model: torch, in one of two precisions, or llama.cpp.

Their hidden states are near each other, but not the same. So it is recorded which of them made the keys of a memory.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from spalm.compute import Hardware, available_cores, has_bf16
from spalm.console import say
from spalm.errors import InputError
from spalm.lm.pretrained.folder import PretrainedFolder
from spalm.lm.pretrained.llama import LlamaModel
from spalm.lm.pretrained.model import PretrainedModel

_LARGE = 1 << 25
"""Bytes of weights from which on bfloat16 is considered; fewer fit into caches, where it gains little."""
_LONGEST_TEXT = 8192
"""Highest number of tokens for which llama.cpp keeps room, even if the model could read more."""


@dataclass(frozen=True)
class Backend:
    """A way to run a pretrained model."""

    name: Literal["torch", "llama"] = "torch"
    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of the weights in torch; None: float32 on a CPU, on other devices as they were saved. llama.cpp: None,
    the weights are those of the GGUF file."""

    def __str__(self) -> str:
        return "llama.cpp" if self.name == "llama" else f"torch in {self.precision or 'its own precision'}"

    def is_as_wanted(self, hardware: Hardware) -> bool:
        """Returns whether it is what the user asked for, if for anything."""
        return hardware.backend in {"auto", self.name} and hardware.precision in {"auto", self.precision or "float32"}


def usable_backends(folder: PretrainedFolder, hardware: Hardware) -> list[Backend]:
    """Returns the backends that can run a model here, among those that the user allows.

    As a rule, a later one is faster.
    """
    on_cpu = hardware.prepare().type == "cpu"
    if hardware.backend == "llama":
        if hardware.precision != "auto":
            raise InputError("--precision is torch's; llama.cpp has the weights of the GGUF file. Leave it out")
        return [Backend("llama")]
    if hardware.precision != "auto":
        return [Backend("torch", hardware.precision)]
    if not on_cpu:
        return [Backend()]
    found = [Backend("torch", "float32")]
    if has_bf16() and folder.size >= _LARGE:
        found.append(Backend("torch", "bfloat16"))
    if hardware.backend == "auto" and _has_llama(folder):
        found.append(Backend("llama"))
    return found


def usable_for(made_by: Backend, folder: PretrainedFolder, hardware: Hardware) -> Backend:
    """Returns the backend that continues what one began: the same or, if that is not there, torch in float32.

    Hidden states of all backends are so near each other that they can be compared.
    """
    on_cpu = hardware.prepare().type == "cpu"
    if made_by.name == "llama" and hardware.backend != "llama" and not _has_llama(folder):
        missing = "llama.cpp or the GGUF file is"
    elif made_by.precision == "bfloat16" and on_cpu and hardware.precision == "auto" and not has_bf16():
        missing = "arithmetic in bfloat16 is"
    elif made_by == Backend() and on_cpu:
        return Backend("torch", "float32")
    else:
        return made_by
    say(f"keys were made by {made_by}; {missing} not there, so further ones are made by torch in float32")
    return Backend("torch", "float32")


def open_with(backend: Backend, folder: PretrainedFolder, hardware: Hardware) -> PretrainedModel | LlamaModel:
    """Opens a model with one backend."""
    if backend.name == "torch":
        return folder.load(hardware.prepare(), backend.precision)
    if folder.gguf is None:
        raise InputError("--backend llama: the model did not come as a GGUF file, or that is gone; attach it again")
    return LlamaModel(folder.gguf, threads=hardware.threads or available_cores(), context=_LONGEST_TEXT)


def lanes_of(model: PretrainedModel | LlamaModel, on_gpu: int) -> int:
    """Returns the number of windows that a model reads side by side; `on_gpu` is that of a GPU."""
    if isinstance(model, LlamaModel):
        return 1
    return torch.get_num_threads() if model.device.type == "cpu" else on_gpu


def _has_llama(folder: PretrainedFolder) -> bool:
    """Returns whether llama.cpp is installed and the model came as a GGUF file that is still there."""
    if find_spec("llama_cpp") is None:
        return False
    try:
        return folder.gguf is not None
    except InputError as error:
        say(f"{error}; torch runs the model")
        return False
