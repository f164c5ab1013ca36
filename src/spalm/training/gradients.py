"""Gradients of one step: micro-batch by micro-batch, and on a CPU in several threads that each take some lanes."""

import copy

import torch
from torch import Tensor, nn

from spalm.compute import autocast, map_in_threads
from spalm.corpus import Batch
from spalm.training.replica import Replica

LaneMemories = list[list[Tensor]]
"""Carried short-term memory of each micro-batch, layer by layer."""


class RandomLayer(nn.Module):
    """A layer that draws random numbers in training."""

    generator: torch.Generator | None = None
    """Generator that it draws from on a CPU; None: torch's own, which all threads share."""


class GradientAccumulator:
    """Adds up the gradients of a rank's `lanes` lanes in the parameters of `replica.model`.

    At most `micro_batch` lanes are computed at a time; None: all. With several threads, each has a copy of the model
    that shares its parameters and has gradients of its own; these are added up in a fixed order. Threads take
    micro-batches in turn: of n threads the first takes numbers 0, n, 2n and so on.
    """

    def __init__(self, replica: Replica, lanes: int, micro_batch: int | None, *, bf16: bool = False):
        self._replica, self._bf16 = replica, bf16
        at_a_time = min(micro_batch or lanes, lanes)
        threads = min(replica.threads, at_a_time)
        self._size = at_a_time // threads
        """Lanes of a micro-batch."""
        self._copies = [_copy_sharing_parameters(replica.loss) for _ in range(threads)] if threads > 1 else []
        self._generators = [_own_generator(module) for module in self._copies]

    @property
    def threads(self) -> int:
        """Number of threads that share a step's lanes."""
        return max(1, len(self._copies))

    def switch_dropout(self, *, on: bool) -> None:
        """Switches dropout on or off."""
        for module in self._copies or [self._replica.loss]:
            module.train(on)

    def split_memory(self, lanes: list[Tensor]) -> LaneMemories:
        """Divides every layer's memory of all lanes into the memories of the micro-batches."""
        return [list(part) for part in zip(*(layer.split(self._size) for layer in lanes))]

    def add(self, batch: Batch, memories: LaneMemories) -> tuple[float, LaneMemories]:
        """Adds up the gradients of a batch; returns the mean loss and the memories after it."""
        lanes, tokens = len(batch.targets), batch.targets.numel()
        parts = [batch.lanes(first, first + self._size) for first in range(0, lanes, self._size)]
        before = memories or [[] for _ in parts]
        outcomes = self._in_threads(parts, before, tokens) if self._copies else self._in_turn(parts, before, tokens)
        return sum(loss for loss, _ in outcomes) / tokens, [memory for _, memory in outcomes]

    def _in_turn(self, parts: list[Batch], memories: LaneMemories, tokens: int) -> list[tuple[float, list[Tensor]]]:
        """Computes the gradients of all parts in this thread; ranks exchange them with the last part."""
        outcomes = []
        with self._replica.without_exchange():
            for part, memory in zip(parts[:-1], memories):
                outcomes.append(self._backward(self._replica.loss, part, memory, tokens=tokens))
        return [*outcomes, self._backward(self._replica.loss, parts[-1], memories[-1], tokens=tokens)]

    def _in_threads(self, parts: list[Batch], memories: LaneMemories, tokens: int) -> list[tuple[float, list[Tensor]]]:
        """Computes the gradients of the parts in several threads, then adds up those of the threads."""
        count = len(self._copies)
        for generator in self._generators:
            if generator is not None:
                generator.manual_seed(int(torch.randint(2**62, ())))
        outcomes: list[tuple[float, list[Tensor]]] = [(0.0, [])] * len(parts)

        def work(thread: int) -> None:
            for number in range(thread, len(parts), count):
                outcomes[number] = self._backward(self._copies[thread], parts[number], memories[number], tokens=tokens)

        map_in_threads(work, range(count), count=count)
        for parameters in zip(self._replica.loss.parameters(), *(module.parameters() for module in self._copies)):
            found = [parameter.grad for parameter in parameters if parameter.grad is not None]
            for other in found[1:]:
                found[0].add_(other)
            for parameter in parameters:
                parameter.grad = None
            parameters[0].grad = found[0] if found else None
        return outcomes

    def _backward(
        self, module: nn.Module, part: Batch, memory: list[Tensor], *, tokens: int
    ) -> tuple[float, list[Tensor]]:
        """Computes the gradients of one micro-batch; returns its summed loss and the memory after it."""
        with autocast(part.inputs.device, bf16=self._bf16):
            summed, after = module(part, memory)
            (summed / tokens).backward()
        return summed.item(), after


def _copy_sharing_parameters(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose parameters are the same memory: an update of one is an update of both."""
    copied = copy.deepcopy(module)
    for theirs, own in zip(copied.parameters(), module.parameters()):
        theirs.data = own.data
    return copied


def _own_generator(module: nn.Module) -> torch.Generator | None:
    """Gives the random layers of a module a generator of their own; returns it, or None if there are no such layers."""
    layers = [layer for layer in module.modules() if isinstance(layer, RandomLayer)]
    if not layers:
        return None
    generator = torch.Generator()
    for layer in layers:
        layer.generator = generator
    return generator
