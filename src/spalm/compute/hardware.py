"""Where the arithmetic happens: device, threads, precision, and an allocator that does not get in the way."""

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from spalm.compute.local_engine import cores_here
from spalm.compute.ranks import ALONE, Ranks
from spalm.errors import InputError


@dataclass(frozen=True)
class Hardware:
    """Switches of one run on one machine: how fast something is made, not what it is."""

    device: str = "auto"
    threads: int | None = None
    compile: bool = False
    fsdp: bool = False
    ranks: Ranks = ALONE

    def __reduce__(self) -> tuple:
        """To another process it goes without the ranks, of which that is none, and with the same kind of device."""
        return Hardware, (self._device, self.threads, self.compile)

    @property
    def _device(self) -> str:
        return best_device() if self.device == "auto" else self.device

    def refuse_unless_ranks(self) -> None:
        """Complains if a model is to be divided among nobody."""
        if self.fsdp and not self.ranks.many:
            raise InputError("--fsdp divides a model among ranks; start several with torchrun --nproc-per-node")

    def prepare(self, *, together: bool = False) -> torch.device:
        """The device to use, with threads and allocator set for it; `together`: by all ranks at the same time."""
        self.refuse_unless_ranks()
        name = self._device
        if self.ranks.many:
            if name == "mps":
                raise InputError("--device mps: ranks cannot exchange tensors from there; give --device cpu")
            name = f"cuda:{self.ranks.local_rank}" if name == "cuda" else name
            torch.set_num_threads(max(1, cores_here() // (self.ranks.local_count if together else 1)))
        try:
            device = torch.device(name)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError):
            raise InputError(f"--device {name}: torch cannot use it here; this machine has {best_device()}") from None
        if self.threads is not None:
            if self.threads < 1:
                raise InputError(f"--threads {self.threads}: give 1 or more")
            torch.set_num_threads(self.threads)
        if device.type == "cpu":
            keep_freed_memory()
        elif device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        return device


def autocast(device: torch.device, *, bf16: bool) -> AbstractContextManager:
    """bfloat16 for the matrix products inside the network; probabilities stay in single precision."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def give_back_freed_memory() -> None:
    """Gives freed memory back to the system now, whatever `keep_freed_memory` said: others are about to need it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory for the next tensor instead of giving it back to the system.

    Each large tensor is otherwise mapped, faulted in page by page and unmapped again, which a small model's step feels.
    """
    if not sys.platform.startswith("linux"):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        trim_threshold, top_pad, mmap_max = -1, -2, -4
        set_option(mmap_max, 0)
        set_option(trim_threshold, 2**31 - 1)
        set_option(top_pad, 64 << 20)
