"""The memory that is to be made and the machines it is made on: the sizes from which a plan is computed."""

from dataclasses import dataclass, replace
from math import sqrt

from spalm.lm import NetworkSettings, count_flops
from spalm.neighbours import NeighbourSettings
from spalm.neighbours.index.ivf import GROUPS
from spalm.neighbours.join.cost import GFLOPS, core_seconds
from spalm.neighbours.partitions import BEAM, NEAR, partition_size
from spalm.runs import Recipe

DOCUMENT = 500
"""Assumed mean number of tokens of a document."""
MEASURED = 4e6
"""Number of keys up to which the time of the join was measured."""
_DOCUMENT_BYTES, _NAME_BYTES = 32, 90
"""Bytes of RAM for each document of an open memory: for four numbers, and for a name of 30 letters."""


@dataclass(frozen=True)
class Cluster:
    """The machines on which a memory is made."""

    machines: int
    cores: int
    """Number of cores of a machine."""
    ram: float
    """RAM of a machine, in bytes."""
    storage: float
    """Bytes per second that a machine reads or writes on the shared storage."""


@dataclass(frozen=True)
class PlannedMemory:
    """The memory that is to be made."""

    tokens: float
    network: NetworkSettings
    segment: int
    stride: int
    carried: int
    """Length of the short-term memory with which keys are made."""
    width: int
    """Number of dimensions of a key."""
    neighbours: NeighbourSettings

    @classmethod
    def of(cls, recipe: Recipe, tokens: float) -> "PlannedMemory":
        """Returns the memory that a recipe would make from a number of tokens."""
        segment, width, carried = recipe.training.segment_length, recipe.network.width, recipe.memory.carried
        stride = segment if carried else recipe.memory.stride_in(segment)
        width = min(recipe.memory.key_width or width, width)
        return cls(tokens, recipe.network, segment, stride, carried, width, recipe.neighbours)

    @property
    def scan(self) -> int:
        """Number of dimensions in which the join and the index compare keys, assumed to be half of a key's."""
        return self.width // 2

    @property
    def partition(self) -> int:
        """Number of keys in a partition."""
        return partition_size(int(self.tokens), self.neighbours.count)

    @property
    def partitions(self) -> float:
        """Number of partitions."""
        return max(1.0, self.tokens / self.partition)

    @property
    def flops(self) -> float:
        """Number of floating-point operations to make all keys."""
        forward = count_flops(self.network, 1, segment=self.segment, memory=self.carried, lanes=1).hidden
        return self.tokens * forward * self.segment / self.stride

    @property
    def assigning_seconds(self) -> float:
        """Seconds that a core takes to find the partition of one key, in two levels."""
        return 2 * self.scan * (1 + BEAM) * sqrt(self.partitions) / (GFLOPS * 1e9)

    @property
    def joining_seconds(self) -> float:
        """Seconds that a core takes to find the neighbours of one key.

        This is the measured time, plus the time by which assigning is slower than at the largest size measured.
        """
        measured = core_seconds(self.tokens, 1, self.width, recall=self.neighbours.recall)
        at_measured_size = replace(self, tokens=min(self.tokens, MEASURED))
        return measured + self.assigning_seconds - at_measured_size.assigning_seconds

    @property
    def choosing_seconds(self) -> float:
        """Seconds that a core takes to find the partitions of a live query."""
        return 2 * self.scan * (1 + GROUPS) * sqrt(self.partitions) / (GFLOPS * 1e9)

    @property
    def opened(self) -> float:
        """Bytes of RAM of a process with the partitions, their index and the memory open, without documents' names."""
        return self.partitions * (8 * self.scan + 4 * NEAR) + self.tokens / DOCUMENT * _DOCUMENT_BYTES

    @property
    def names(self) -> float:
        """Bytes of RAM for the documents' names."""
        return self.tokens / DOCUMENT * _NAME_BYTES
