"""The processes of a training run that torchrun has started, and what they tell one another.

Numbers and words go through torchrun's own store, which lives as long as torchrun does: a rank can wait there for hours
while the first makes a corpus, and still be ended. Tensors go from rank to rank.
"""

import itertools
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spalm.console import console
from spalm.errors import InputError
from spalm.settings import differences

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells a process; without all of them it is alone."""
_PATIENCE = timedelta(hours=2)
"""For an exchange of tensors: longer than the first rank takes for a checkpoint."""
_LOOKS = 0.05
"""Seconds between looks for what another rank is to say."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. Every method is to be called by all of them, in the same order."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    """Of this machine."""
    _store: Any = None
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False)

    @property
    def first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    @property
    def many(self) -> bool:
        return self.count > 1

    def share(self, lanes: int) -> range:
        """The lanes of this rank: neighbouring ones, as many as every other rank has."""
        if lanes % self.count:
            raise InputError(
                f"training.batch_size = {lanes} cannot be divided among {self.count} ranks; "
                "give a multiple of their number, or another --nproc-per-node"
            )
        each = lanes // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def tell(self, value: Any = None) -> Any:
        """The first rank's value, for all; the others wait for it, however long it takes."""
        return self._exchange(value, [0])[0]

    def same(self, value: Any, what: str, remedy: str) -> None:
        """Refuses to go on if the ranks do not agree on a value."""
        everyone = self._exchange(value, range(self.count))
        for rank, theirs in enumerate(everyone):
            changed = differences(everyone[0], theirs)
            if changed:
                raise InputError(f"ranks 0 and {rank} have different {what} ({changed[0].lstrip(': ')}); {remedy}")

    def share_folder(self, directory: Path) -> None:
        """Refuses a folder that is not one and the same for all ranks."""
        if not self.many:
            return
        path = directory / f".{self.tell(uuid.uuid4().hex)}"
        if self.first:
            directory.mkdir(parents=True, exist_ok=True)
            path.touch()
        self.tell()  # that it is there
        seen = self._exchange(path.exists(), range(self.count))
        if self.first:
            path.unlink()
        if not all(seen):
            raise InputError(
                f"{directory} is not shared: rank {seen.index(False)} does not see what rank 0 writes there; "
                "give an --out that is the same folder for all ranks"
            )

    def sum(self, *numbers: float) -> list[float]:
        """Each number, added up over the ranks."""
        if not self.many:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On the first rank, every rank's tensor (they have one shape), in order; nothing on the others."""
        if not self.many:
            return [tensor]
        tensor = tensor.cpu().contiguous()
        theirs = [torch.empty_like(tensor) for _ in range(self.count)] if self.first else None
        dist.gather(tensor, theirs)
        return theirs or []

    def _exchange(self, value: Any, speakers: Any) -> list[Any]:
        """What each of the speakers says at this point of the run."""
        if not self.many:
            return [value]
        turn = next(self._turns)
        if self.rank in speakers:
            self._store.set(f"said/{turn}/{self.rank}", json.dumps(value))
        return [json.loads(self._hear(f"said/{turn}/{rank}")) for rank in speakers]

    def _hear(self, key: str) -> bytes:
        while not self._store.check([key]):
            time.sleep(_LOOKS)  # not in the store's own wait, which heeds no signal
        return self._store.get(key)

    def _to_speak(self) -> bool:
        """Whether it falls to this rank to say why the run has ended: one reason is enough."""
        try:
            return self._store.add("ended", 1) == 1
        except RuntimeError:
            return True  # torchrun itself is gone


ALONE = Ranks()


class _Ended(BaseException):
    """torchrun's signal to those that are left. No handler of errors is to take it for one of its own."""


@contextmanager
def ranks_of_torchrun() -> Iterator[Ranks]:
    """Joins the other ranks for as long as it lasts; without torchrun, there is nobody to join.

    Only the first rank talks and, if the run ends before its time, the one that is first to know why.
    """
    if not all(name in os.environ for name in _VARIABLES) or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    ranks = _join()
    signal.signal(signal.SIGTERM, _end)
    console.quiet = not ranks.first
    try:
        yield ranks
        ranks.tell()  # that the first has done what it does alone
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        console.quiet = not ranks._to_speak()
        if isinstance(error, _Ended) or _is_of_the_exchange(error):
            raise InputError(
                "another rank has ended, or the run was stopped; run the same command again to go on"
            ) from None
        raise
    dist.destroy_process_group()


def _join() -> Ranks:
    rank, count, local_rank, local_count = (int(os.environ[name]) for name in _VARIABLES[:4])
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, _, _ = next(dist.rendezvous("env://"))
        # torchrun --max-restarts keeps the store: what an earlier attempt said there must not be heard.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_PATIENCE)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"rank {rank} of {count} does not reach the others ({reason}); start them again") from None
    return Ranks(rank, count, local_rank, local_count, dist.PrefixStore("spalm", store))


def _end(*_: Any) -> None:
    raise _Ended


def _is_of_the_exchange(error: BaseException) -> bool:
    """gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
