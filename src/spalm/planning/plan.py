"""What a memory will cost before it is made: core-hours, RAM, disk and network of each stage, and what breaks first.

Everything is computed from a few constants, each measured on one core of an AMD EPYC with 97 GFLOP/s in the
products of the join, and from the sizes of what the stages read and write. Bytes count as network: on a cluster,
storage is shared.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any

from spalm.errors import InputError
from spalm.lm import NetworkSettings, count_flops
from spalm.memory.shards import SHARD_BYTES
from spalm.neighbours import NeighbourSettings
from spalm.neighbours.index.ivf import GROUPS
from spalm.neighbours.join.cost import GFLOPS, GROWTH, core_seconds
from spalm.neighbours.partitions import BEAM, NEAR, POINTS, partition_size
from spalm.runs import Recipe

_READING_GFLOPS = 84.0
"""Of a core that makes keys with the network of wikitext103: make bench-plan."""
_FRESH, _FRESH_GROWTH, _MOST_FRESH = 5.3, 0.43, 32.0
"""Keys in the space of the scan that a query of the join has to fetch, those of a block counted once: at 4 million,
grown from 2.9 at 1 million (make bench-plan); where it ends is an assumption."""
_WHOLE = 8.0
"""Whole keys that it is compared with: make bench-plan."""
_FILLING_MICROSECONDS = 9.0
"""Of a core for each key of an index, without finding its partition: make bench-disk."""
_EFFORT = 8
"""Lists that a live query reads for a recall of 0.95: make bench-disk."""
_PROCESS = 0.7e9
"""Bytes of a process with its libraries: make bench-disk."""
_DOCUMENT = 500
"""Tokens of a document, on average: an assumption."""
_DOCUMENT_BYTES, _NAME_BYTES = 32, 90
"""RAM for a document while a memory is open: four numbers; and a name of 30 letters."""
_CANDIDATES = 20
"""Whole keys that a live query for 4 neighbours is compared with."""
_PAGE = 4096
_QUERY_MILLISECONDS = 1.0
"""Of a live query when everything is in RAM: make bench-disk."""
_DAY = 86400.0
_MEASURED = 4e6
"""Keys up to which the time of the join was measured."""
_COUNTS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Cluster:
    machines: int
    cores: int
    """Of a machine."""
    ram: float
    """Bytes of a machine."""
    storage: float
    """Bytes a second that a machine reads or writes on the shared storage."""


@dataclass(frozen=True)
class Wanted:
    """The memory that is to be made."""

    tokens: float
    network: NetworkSettings
    segment: int
    stride: int
    carried: int
    """Length of the short-term memory that is carried while keys are made."""
    width: int
    """Of a key."""
    neighbours: NeighbourSettings

    @classmethod
    def of(cls, recipe: Recipe, tokens: float) -> "Wanted":
        """A memory of so many tokens, as a recipe would make it."""
        segment, width, carried = recipe.training.segment_length, recipe.network.width, recipe.memory.carried
        stride = segment if carried else recipe.memory.stride_in(segment)
        width = min(recipe.memory.key_width or width, width)
        return cls(tokens, recipe.network, segment, stride, carried, width, recipe.neighbours)

    @property
    def scan(self) -> int:
        """Width of the space in which the join and the index compare keys: at most half of the keys', an assumption."""
        return self.width // 2

    @property
    def partition(self) -> int:
        """Keys of a partition."""
        return partition_size(int(self.tokens), self.neighbours.count)

    @property
    def partitions(self) -> float:
        return max(1.0, self.tokens / self.partition)

    @property
    def flops(self) -> float:
        """Of all keys."""
        forward = count_flops(self.network, 1, self.segment, self.carried, 1).hidden
        return self.tokens * forward * self.segment / self.stride

    @property
    def assigning_seconds(self) -> float:
        """Of a core, to find the partition of one key by the two levels."""
        return 2 * self.scan * (1 + BEAM) * sqrt(self.partitions) / (GFLOPS * 1e9)

    @property
    def joining_seconds(self) -> float:
        """Of a core, for the neighbours of one key: as measured, and what assigning takes more than it did then."""
        measured = core_seconds(self.tokens, 1, self.width, self.neighbours.recall)
        then = replace(self, tokens=min(self.tokens, _MEASURED))
        return measured + self.assigning_seconds - then.assigning_seconds

    @property
    def choosing_seconds(self) -> float:
        """Of a core, to find the partitions of a live query."""
        return 2 * self.scan * (1 + GROUPS) * sqrt(self.partitions) / (GFLOPS * 1e9)

    @property
    def opened(self) -> float:
        """RAM of a process that has the partitions, their index and the memory open, but no names of documents."""
        return self.partitions * (8 * self.scan + 4 * NEAR) + self.tokens / _DOCUMENT * _DOCUMENT_BYTES

    @property
    def names(self) -> float:
        """RAM for the documents' names."""
        return self.tokens / _DOCUMENT * _NAME_BYTES


@dataclass(frozen=True)
class Stage:
    name: str
    core_hours: float
    ram: float
    """Bytes of a machine, at least."""
    kept: float
    """Bytes on disk."""
    scratch: float
    """Bytes on disk while it runs."""
    read: float
    written: float
    alone: float = 0.0
    """Bytes of these that one machine moves, whatever there are."""

    def hours(self, cluster: Cluster) -> float:
        """With all machines: computing, and what storage adds where it is slower."""
        computing = self.core_hours / (cluster.machines * cluster.cores)
        shared = (self.read + self.written - self.alone) / (cluster.machines * cluster.storage) / 3600
        return max(computing, shared) + self.alone / cluster.storage / 3600


def stages(wanted: Wanted, cluster: Cluster) -> list[Stage]:
    return [_keys(wanted), _join(wanted, cluster), _index(wanted, cluster)]


def most_disk(made: list[Stage]) -> float:
    """Bytes at a time: what the stages so far have left, and the scratch of the one at hand."""
    return max(sum(each.kept for each in made[: number + 1]) + stage.scratch for number, stage in enumerate(made))


def _keys(wanted: Wanted) -> Stage:
    """Hidden states of overlapping windows, in half precision, and the tokens that came next."""
    entries = wanted.tokens * (2 * wanted.width + 4)
    return Stage(
        "keys",
        wanted.flops / (_READING_GFLOPS * 1e9) / 3600,
        _PROCESS + 2 * SHARD_BYTES,
        kept=entries,
        scratch=0.0,
        read=4 * wanted.tokens * wanted.segment / wanted.stride,
        written=entries,
    )


def _join(wanted: Wanted, cluster: Cluster) -> Stage:
    """Keys are read and assigned, read again and moved into order; then each block reads the partitions around it."""
    tokens, count = wanted.tokens, wanted.neighbours.count
    whole, scan, about = 2 * wanted.width, 2 * wanted.scan, 20  # bytes; labels, documents, norms
    assigned, ordered = scan + 8, whole + scan + about
    answer = 8 + 12 * count
    table = tokens * count * (12 if tokens > 2**31 else 8)
    moving = tokens * (whole + assigned + ordered)
    fresh = min(_MOST_FRESH, _FRESH * (tokens / _MEASURED) ** _FRESH_GROWTH)
    joining = tokens * (fresh * (scan + about) + _WHOLE * whole + answer)
    return Stage(
        "neighbours",
        tokens * wanted.joining_seconds / 3600,
        (_PROCESS + wanted.opened) * cluster.cores + wanted.names,
        kept=table,
        scratch=tokens * (assigned + ordered + answer),
        read=tokens * (whole + whole + assigned) + joining,
        written=tokens * (assigned + ordered + 2 * answer),
        alone=moving,
    )


def _index(wanted: Wanted, cluster: Cluster) -> Stage:
    """Keys are read and sorted into lists of codes. One machine puts these together, and reads all keys again, by which
    it judges what is found."""
    keys, lists = wanted.tokens * 2 * wanted.width, wanted.tokens * (wanted.scan + 8)
    seconds = wanted.tokens * (_FILLING_MICROSECONDS * 1e-6 + wanted.assigning_seconds)
    return Stage(
        "index",
        seconds / 3600,
        (_PROCESS + wanted.opened) * cluster.cores + wanted.names,
        kept=lists,
        scratch=lists,
        read=2 * keys + lists,
        written=2 * lists,
        alone=keys + 2 * lists,
    )


def serving(wanted: Wanted, cluster: Cluster) -> dict[str, float]:
    """Of a live query of an index on disk of which nothing is cached."""
    lists = _EFFORT * wanted.partition * (wanted.scan + 8)
    keys = _CANDIDATES * (2 * wanted.width + _PAGE)
    seconds = wanted.choosing_seconds + (lists + keys) / cluster.storage
    return {
        "ram": _PROCESS + wanted.opened + wanted.names,
        "bytes_read": lists + keys,
        "milliseconds": 1000 * seconds + _QUERY_MILLISECONDS,
    }


@dataclass(frozen=True)
class Limit:
    """Something that does not hold for ever."""

    what: str
    tokens: float
    """Up to which it holds."""
    remedy: str


def limits(wanted: Wanted, cluster: Cluster) -> list[Limit]:
    """What breaks, the first first."""

    def holds_until(holds: Callable[[Wanted], bool]) -> float:
        low, high = 1e3, 1e18  # tokens
        while high / low > 1.01:
            middle = sqrt(low * high)
            low, high = (middle, high) if holds(replace(wanted, tokens=middle)) else (low, middle)
        return low

    compared = cluster.cores * GFLOPS * 1e9 * _DAY
    found = [
        Limit(
            "one machine moves the keys into order within a day",
            holds_until(lambda one: _join(one, cluster).alone / cluster.storage <= _DAY),
            "every machine moves the keys of its own partitions, into files of its own",
        ),
        Limit(
            "partitions are learned from as many points as they should be, in an eighth of a machine's RAM",
            holds_until(lambda one: POINTS * one.partitions * 4 * one.scan <= cluster.ram / 8),
            "they are learned from fewer, and recall costs more; or groups first, each learned by another machine",
        ),
        Limit(
            "one machine finds which partitions are near which within a day",
            holds_until(lambda one: 2 * one.scan * one.partitions**2 <= compared),
            "compare only the partitions of near groups",
        ),
        Limit(
            "a machine's RAM holds the partitions once for each of its cores",
            holds_until(lambda one: _join(one, cluster).ram <= cluster.ram),
            "fewer workers on a machine (--ram); or partitions in a mapped file, which they share",
        ),
        Limit(
            "a machine's RAM holds the partitions and the documents' names",
            holds_until(lambda one: one.opened + one.names <= cluster.ram),
            "names stay in the catalogue, partitions in a mapped file; or several memories, each asked",
        ),
        Limit(
            "finding a key's partition is less than half of the join",
            holds_until(lambda one: one.assigning_seconds < one.joining_seconds / 2),
            "groups of groups: a third level",
        ),
        Limit(
            "a folder holds a million shards",
            holds_until(lambda one: one.tokens * 2 * one.width / SHARD_BYTES <= 1e6),
            "larger shards: SHARD_BYTES",
        ),
        Limit(
            "partitions have numbers of 32 bits",
            holds_until(lambda one: one.partitions < 2**31),
            "64 bits",
        ),
    ]
    return sorted(found, key=lambda limit: limit.tokens)


def plan(wanted: Wanted, cluster: Cluster) -> dict[str, Any]:
    """Everything as plain figures: bytes, hours, tokens."""
    return {
        "tokens": wanted.tokens,
        "flops": wanted.flops,
        "cluster": asdict(cluster),
        "stages": [{**asdict(stage), "hours": stage.hours(cluster)} for stage in stages(wanted, cluster)],
        "most_disk": most_disk(stages(wanted, cluster)),
        "serving": serving(wanted, cluster),
        "limits": [asdict(limit) for limit in limits(wanted, cluster)],
        "assumptions": assumptions(wanted, cluster),
    }


def assumptions(wanted: Wanted, cluster: Cluster) -> list[str]:
    return [
        f"keys of width {wanted.width}, compared in {wanted.scan} dimensions (half; seen: 96 of 512, 288 of 576)",
        f"windows of {wanted.segment} tokens, {wanted.stride} of them new",
        f"{wanted.neighbours.count} neighbours at a recall of {wanted.neighbours.recall}",
        f"cores with {GFLOPS:.0f} GFLOP/s in products of 512 x 128 x 256, {_READING_GFLOPS:.0f} when they make keys",
        f"what the join takes grows as keys^{1 + GROWTH}, which was measured up to {in_count(_MEASURED)}",
        f"a machine reads and writes {in_bytes(cluster.storage)} a second; nothing of what it reads is cached",
        f"documents of {_DOCUMENT} tokens",
    ]


def parse_count(text: str) -> float:
    """Tokens from 103M, 1.5G, 1T."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGBT]?)", text.strip())
    number = float(found[1]) * _COUNTS[found[2]] if found else 0
    if number < 1:
        raise InputError(f"--tokens {text}: not a number of tokens; give something like 103M, 852M or 1T")
    return number


def in_bytes(size: float) -> str:
    return _with_unit(size, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def in_count(number: float) -> str:
    return _with_unit(number, ("", "k", "M", "G", "T", "P", "E")).replace(" ", "")


def _with_unit(number: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {units[-1]}"
