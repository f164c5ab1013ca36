"""The part of a model that one rank trains: the model itself, a copy equal to the others (DDP), or a shard (FSDP2)."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spalm.compute import Hardware
from spalm.corpus import Batch
from spalm.errors import InputError

Loss = Callable[[Any, Batch, list[Tensor]], tuple[Tensor, list[Tensor]]]
"""Returns the summed loss of a model on a batch given the lanes' memory, and the memory after it."""


class _LossModule(nn.Module):
    """The loss as a module's forward, output layer included: DDP and FSDP2 exchange gradients around a forward."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return self._loss(self.model, batch, memory)


class Replica:
    """One rank's part of a model in training.

    `model` has the parameters to optimise; the backward pass of `loss` exchanges gradients with other ranks.
    """

    def __init__(self, model: nn.Module, loss: Loss, device: torch.device, *, hardware: Hardware):
        self._full, self._device, self._ranks = model, device, hardware.ranks
        self._sharded = hardware.fsdp
        module = _LossModule(
            copy.deepcopy(model) if self._sharded else model, torch.compile(loss) if hardware.compile else loss
        )
        self.model = module.model
        if self._sharded:
            shard(module, device, self._ranks.world_size)
        else:
            module.to(device)
        copied = self._ranks.distributed and not self._sharded
        alone = device.type == "cpu" and not self._ranks.distributed and not hardware.compile
        self.threads = torch.get_num_threads() if alone else 1
        """Number of threads that can divide the lanes among them."""
        self.loss = DistributedDataParallel(module, gradient_as_bucket_view=True) if copied else module

    def without_exchange(self) -> AbstractContextManager:
        """Returns a context for every micro-batch but the last, in which DDP does not exchange gradients.

        DDP exchanges the sum of all gradients with the last micro-batch. FSDP2 exchanges gradients after each, since it
        would otherwise have to hold full gradients.
        """
        return self.loss.no_sync() if isinstance(self.loss, DistributedDataParallel) else nullcontext()

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """Yields the full model, on the device, on the first rank; all ranks must call it to put it together."""
        if self._sharded:
            own = self._full.state_dict()
            for name, tensor in self.model.state_dict().items():
                full = full_tensor(tensor)
                if self._ranks.is_first:
                    own[name].copy_(full)
            self._full.to(self._device if self._ranks.is_first else "cpu")
        yield self._full
        if self._sharded:
            self._full.to("cpu")


def shard(model: nn.Module, device: torch.device, count: int) -> None:
    """Cuts every parameter into a shard for each rank; a layer's parameters are put together only while it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise InputError(
                f"--fsdp: {name.removeprefix('model.')} is a single number, which cannot be cut; train without --fsdp"
            )
    mesh = init_device_mesh(device.type, (count,))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor put together from the ranks' shards, if it is sharded; all ranks must call it."""
    return cast(Any, tensor).full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's shard of a full tensor, if `like` is sharded."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
