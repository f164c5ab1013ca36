"""Hardware for the arithmetic: device, threads and precision."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from spalm.choices import BackendName, PrecisionName
from spalm.compute.ram import keep_freed_memory
from spalm.compute.ranks import SINGLE_RANK, Ranks
from spalm.compute.threads import available_cores
from spalm.errors import InputError


@dataclass(frozen=True)
class Hardware:
    """Device, threads and ranks of one process. They change how fast something is made, not what it is."""

    device: str = "auto"
    """Name of torch's device, or auto: CUDA, MPS or the CPU, whichever is there first."""
    threads: int | None = None
    """CPU threads; None: all cores, in training divided among the ranks of a machine."""
    compile: bool = False
    """Whether training runs through torch.compile."""
    fsdp: bool = False
    """Whether the parameters are sharded among the ranks (FSDP2) instead of copied to each (DDP)."""
    ranks: Ranks = SINGLE_RANK
    """This process among those that torchrun has started."""
    backend: BackendName = "auto"
    """What runs a pretrained model: torch, or llama.cpp for one that came as a GGUF file; auto: llama.cpp where it can,
    while text is generated, and for keys what is measured to be the fastest."""
    precision: PrecisionName = "auto"
    """Precision in which torch runs a pretrained model; auto: bfloat16 on a CPU that computes with it."""

    def __reduce__(self) -> tuple:
        """Pickles the hardware for another process: the same kind of device, but without the ranks of this one."""
        own = self._device_name, self.threads, self.compile, False, SINGLE_RANK, self.backend, self.precision
        return Hardware, own

    @property
    def _device_name(self) -> str:
        return best_device() if self.device == "auto" else self.device

    def refuse_fsdp_on_one_rank(self) -> None:
        """Raises an error if parameters are to be sharded and there is only one rank."""
        if self.fsdp and not self.ranks.distributed:
            raise InputError("--fsdp divides a model among ranks; start several with torchrun --nproc-per-node")

    def refuse_unless_usable(self) -> None:
        """Raises an error for a device or a number of threads that cannot be used, before anything is begun with it."""
        if self.threads is not None and self.threads < 1:
            raise InputError(f"--threads {self.threads}: give 1 or more")
        if not _is_usable(self._device_name):
            raise InputError(f"--device {self.device}: torch cannot use it here; this machine has {best_device()}")

    def prepare(self, *, all_ranks: bool = False) -> torch.device:
        """Returns the device, with threads and allocator set for it.

        `all_ranks`: the ranks of this machine compute at the same time and divide its cores among them.
        """
        self.refuse_fsdp_on_one_rank()
        self.refuse_unless_usable()
        name = self._device_name
        if self.ranks.distributed:
            if name == "mps":
                raise InputError("--device mps: ranks cannot exchange tensors from there; give --device cpu")
            name = f"cuda:{self.ranks.local_rank}" if name == "cuda" else name
            torch.set_num_threads(max(1, available_cores() // (self.ranks.local_world_size if all_ranks else 1)))
        try:
            device = torch.device(name)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError):
            raise InputError(f"--device {name}: torch cannot use it here; this machine has {best_device()}") from None
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if device.type == "cpu":
            keep_freed_memory()
        elif device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        return device


def autocast(device: torch.device, *, bf16: bool) -> AbstractContextManager:
    """Returns a context in which a network's matrix products are in bfloat16; without `bf16`, one that does nothing.

    Probabilities stay in single precision.
    """
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def has_bf16() -> bool:
    """Returns whether the CPU multiplies matrices in bfloat16 (AVX512-BF16 or AMX) instead of emulating that."""
    found = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _is_usable(name: str) -> bool:
    """Returns whether torch can compute on a device. No GPU is touched: which one a rank gets is not known yet."""
    try:
        device = torch.device(name)
        if device.type == "cuda":
            return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        return device.type != "meta" and torch.empty(1, device=device).numel() == 1
    except (RuntimeError, AssertionError):
        return False


def best_device() -> str:
    """Returns the name of the fastest kind of device that this machine has."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
