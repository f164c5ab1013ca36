"""The processes of a training run that torchrun has started, and how they exchange values.

Small values go through torchrun's own key-value store, which lives as long as torchrun does: a rank can wait there for
hours while the first makes a corpus, and can still be ended. Tensors go from rank to rank.
"""

import itertools
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from spalm.console import console
from spalm.errors import InputError, first_line
from spalm.settings import differences

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets in the environment of a rank; without all of them, this process is the only one."""
_TIMEOUT = timedelta(hours=2)
"""Longest wait for an exchange of tensors: longer than the first rank takes for a checkpoint."""
_POLL_SECONDS = 0.05
"""Seconds between looks for a value of another rank in the store."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. All ranks must call the same methods in the same order."""

    rank: int = 0
    """Number of this process, from 0."""
    world_size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of this process among those of its machine."""
    local_world_size: int = 1
    """Number of processes of this machine."""
    _store: Any = None
    """Key-value store of torchrun."""
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False)
    """Counter of exchanges. It is the same on all ranks, so that it names the values in the store."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.world_size > 1

    def own_lanes(self, lanes: int) -> range:
        """Returns the lanes of this rank: adjacent ones, as many as every other rank has."""
        if lanes % self.world_size:
            raise InputError(
                f"training.batch_size = {lanes} cannot be divided among {self.world_size} ranks; "
                "give a multiple of their number, or another --nproc-per-node"
            )
        share = lanes // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def broadcast(self, value: Any = None) -> Any:
        """Returns the first rank's value on all ranks; the others wait for it, however long it takes."""
        return self._exchange(value, [0])[0]

    def refuse_unless_equal(self, value: Any, name: str, remedy: str) -> None:
        """Raises an error on all ranks, with `name` and `remedy` in it, unless they have the same value."""
        values = self._exchange(value, range(self.world_size))
        for rank, theirs in enumerate(values):
            changed = differences(values[0], theirs)
            if changed:
                raise InputError(f"ranks 0 and {rank} have different {name} ({changed[0].lstrip(': ')}); {remedy}")

    def refuse_unless_shared(self, directory: Path) -> None:
        """Raises an error on all ranks unless `directory` is one and the same folder for them."""
        if not self.distributed:
            return
        path = directory / f".{self.broadcast(uuid.uuid4().hex)}"
        if self.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            path.touch()
        self.wait_for_first()
        seen = self._exchange(path.exists(), range(self.world_size))
        if self.is_first:
            path.unlink()
        if not all(seen):
            raise InputError(
                f"{directory} is not shared: rank {seen.index(False)} does not see what rank 0 writes there; "
                "give an --out that is the same folder for all ranks"
            )

    def wait_for_first(self) -> None:
        """Waits until the first rank has come to this point."""
        self.broadcast()

    def sum(self, *numbers: float) -> list[float]:
        """Returns each number added up over the ranks."""
        if not self.distributed:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns every rank's tensor, in order, on the first rank, and nothing on the others. Shapes must be equal."""
        if not self.distributed:
            return [tensor]
        tensor = tensor.cpu().contiguous()
        theirs = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.is_first else None
        dist.gather(tensor, theirs)
        return theirs or []

    def _exchange(self, value: Any, senders: Sequence[int]) -> list[Any]:
        """Returns the values that the senders have at this point of the run."""
        if not self.distributed:
            return [value]
        turn = next(self._turns)
        if self.rank in senders:
            self._store.set(f"value/{turn}/{self.rank}", json.dumps(value))
        return [json.loads(self._receive(f"value/{turn}/{rank}")) for rank in senders]

    def _receive(self, key: str) -> bytes:
        """Waits for a value in the store and returns it."""
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)  # not in the store's own wait, which no signal interrupts
        return self._store.get(key)

    def _is_first_to_end(self) -> bool:
        """Whether this rank is the one to report why the run has ended: one reason is enough."""
        try:
            return self._store.add("ended", 1) == 1
        except RuntimeError:
            return True  # torchrun itself is gone


SINGLE_RANK = Ranks()
"""A process that was not started by torchrun."""


class _Terminated(BaseException):
    """Raised when torchrun ends the ranks that are left. Not an Exception, so that no handler of errors catches it."""


@contextmanager
def ranks_of_torchrun() -> Iterator[Ranks]:
    """Joins the other ranks for the duration of a block; without torchrun, yields a single rank.

    Only the first rank prints. If the run ends early, the rank that is the first to know the reason prints it.
    """
    if not all(name in os.environ for name in _VARIABLES) or os.environ["WORLD_SIZE"] == "1":
        yield SINGLE_RANK
        return
    ranks = _join()
    signal.signal(signal.SIGTERM, _terminate)
    console.quiet = not ranks.is_first
    try:
        yield ranks
        ranks.wait_for_first()  # the first rank may still be working alone
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        console.quiet = not ranks._is_first_to_end()
        if isinstance(error, _Terminated) or _is_lost_connection(error):
            raise InputError(
                "another rank has ended, or the run was stopped; run the same command again to go on"
            ) from None
        raise
    dist.destroy_process_group()


def _join() -> Ranks:
    """Connects this process with the other ranks."""
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in _VARIABLES[:4])
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, _, _ = next(rendezvous("env://"))
        # torchrun --max-restarts keeps the store: values of an earlier attempt must not be read.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    except RuntimeError as error:
        raise InputError(
            f"rank {rank} of {world_size} does not reach the others ({first_line(error)}); start them again"
        ) from None
    return Ranks(rank, world_size, local_rank, local_world_size, PrefixStore("spalm", store))


def _terminate(*_: Any) -> None:
    """Handles SIGTERM by raising an exception."""
    raise _Terminated


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error comes from the exchange of tensors. Errors of gloo have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
