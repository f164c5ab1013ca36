"""What one rank trains: the model itself, a copy kept equal to the others' (DDP), or a share of it (FSDP2)."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spalm.compute.hardware import Hardware
from spalm.corpus import Batch
from spalm.errors import InputError

Loss = Callable[[nn.Module, Batch, list[Tensor]], tuple[Tensor, list[Tensor]]]
"""The summed loss of a model on a batch given the lanes' memory, and the memory after it."""


class _Step(nn.Module):
    """The loss as a module's forward: DDP and FSDP2 do their part around that, and the output layer belongs to it."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return self._loss(self.model, batch, memory)


class Replica:
    """`model` has the parameters to optimise; the backward pass of `loss` exchanges gradients with other ranks."""

    def __init__(self, model: nn.Module, loss: Loss, device: torch.device, hardware: Hardware):
        self._whole, self._device, self._ranks = model, device, hardware.ranks
        self._sharded = hardware.fsdp
        step = _Step(
            copy.deepcopy(model) if self._sharded else model, torch.compile(loss) if hardware.compile else loss
        )
        self.model = step.model
        if self._sharded:
            shard(step, device, self._ranks.world_size)
        else:
            step.to(device)
        together = self._ranks.distributed and not self._sharded
        self.loss = DistributedDataParallel(step, gradient_as_bucket_view=True) if together else step

    def part(self) -> AbstractContextManager:
        """Around every part of a step but the last: DDP exchanges gradients once, when they are added up.

        FSDP2 exchanges them part by part, since it would have to hold whole ones otherwise.
        """
        return self.loss.no_sync() if isinstance(self.loss, DistributedDataParallel) else nullcontext()

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """On the first rank, the whole model on the device; all ranks take part in putting it together."""
        if self._sharded:
            own = self._whole.state_dict()
            for name, tensor in self.model.state_dict().items():
                full = whole(tensor)
                if self._ranks.is_first:
                    own[name].copy_(full)
            self._whole.to(self._device if self._ranks.is_first else "cpu")
        yield self._whole
        if self._sharded:
            self._whole.to("cpu")


def shard(model: nn.Module, device: torch.device, count: int) -> None:
    """Cuts every parameter into one share a rank; those of a layer are whole only while it computes."""
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


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from the ranks' shares, if it is cut; all ranks have to ask."""
    return tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor


def cut_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole tensor, if `like` is cut."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
