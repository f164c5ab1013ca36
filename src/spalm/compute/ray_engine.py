"""The engine of many machines: Ray does the scheduling, and does a part again whose worker was lost.

Without an address, Ray is started for this command alone, with the cores of this machine. A job is put into Ray's store
once, and each worker process keeps the last one it was given, with what that has opened.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from spalm.compute.engine import Job, Part, ProgressCallback
from spalm.compute.local_engine import compute_with, cores_here
from spalm.console import say
from spalm.errors import InputError

_RETRIES = 8
"""How often a part is done again whose worker was lost."""
_AHEAD = 2
"""Parts given to Ray for each one that can be at work."""
_LEAD = 8
"""How many times as many may be done before the slowest."""
_LOOK_SECONDS = 30
"""How often it is asked whether there are machines at all, while nothing is done."""
_CONNECT_SECONDS, _ANSWER_SECONDS = 5, 30
"""How long an address is waited for: left to itself, Ray tries for a quarter of an hour."""
_PROBE_SECONDS = 120
"""How long a machine may take to start a worker and look into a folder."""


class RayEngine:
    own_processes = True

    def __init__(self, address: str | None = None, threads: int | None = None):
        self._ray = _library()
        self.given = threads
        _start(self._ray, address, threads)
        try:
            sizes = self._sizes()
            self.machines = sum(size > 0 for size in sizes)
            if not self.machines:
                raise InputError(f"--address {address}: that Ray cluster has no cores to work with; add nodes to it")
            self.slots, self.cores = sum(sizes), max(sizes)
            self.threads = threads or min(size for size in sizes if size)
            if self.threads > self.cores:
                raise InputError(
                    f"--threads {self.threads}: the machines at {address} have at most {self.cores} core(s); give fewer"
                )
        except BaseException:
            self.close()
            raise

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _sizes(self) -> list[int]:
        """Cores of each machine."""
        return [int(node["Resources"].get("CPU", 0)) for node in self._nodes()]

    def close(self) -> None:
        """Ends what was started for this command; a cluster that was joined is left as it is."""
        self._ray.shutdown()

    def each(
        self, job: Job, tasks: Iterable[Part], told: ProgressCallback, threads: int, at_once: int | None = None
    ) -> Iterator[tuple[Part, Any]]:
        cores = threads if at_once is None else max(threads, -(-self.cores // at_once))
        gpus = getattr(job, "gpus", 0)
        run = self._ray.remote(_do).options(num_cpus=cores, num_gpus=gpus, max_retries=_RETRIES)
        common = self._ray.put(job)
        waiting: dict[Any, Part] = {}
        left, most = deque(tasks), _AHEAD * max(1, self.slots // cores)
        try:
            while left or waiting:
                while left and len(waiting) < most and _near(left[0], waiting.values(), _LEAD * most):
                    part = left.popleft()
                    waiting[run.remote([common], part, threads)] = part
                done, _ = self._ray.wait(list(waiting), timeout=_LOOK_SECONDS)
                if not done:
                    self._refuse_unless_room(cores)
                for reference in done:
                    part = waiting.pop(reference)
                    result = self._result(reference)
                    told(len(part))
                    yield part, result
        finally:
            for reference in waiting:
                self._ray.cancel(reference, force=True)

    def _refuse_unless_room(self, cores: int) -> None:
        """Complains if the machines that are left are all too small: Ray would wait for others for ever."""
        if max(self._sizes(), default=0) < cores:
            raise InputError(
                f"no machine of the Ray cluster is left that has {cores} core(s); run the same command again to go on, "
                "with fewer --threads or more machines"
            )

    def _result(self, reference: Any) -> Any:
        """What a task returned; what it raised, as if it had been raised here."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise getattr(error, "cause", None) or error from None
        except errors.RayError as error:
            raise InputError(
                f"Ray gave up a task after {_RETRIES + 1} workers were lost on it ({_first_line(error)}); look at the "
                "machines' memory, then run the same command to go on"
            ) from None

    def refuse_unless_shared(self, folder: Path) -> None:
        path = folder / f".shared-{secrets.token_hex(8)}"
        path.write_text(secrets.token_hex(16))
        try:
            self.refuse_unless_seen(path)
        finally:
            path.unlink(missing_ok=True)

    def refuse_unless_seen(self, file: Path) -> None:
        asked, strategy = [], self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for node in self._nodes():
            there = strategy(node["NodeID"], soft=False)
            look = self._ray.remote(_seen).options(num_cpus=0, scheduling_strategy=there)
            asked.append((node, look.remote(str(file))))
        for node, reference in asked:
            machine = node["NodeManagerAddress"]
            try:
                seen = self._ray.get(reference, timeout=_PROBE_SECONDS)
            except Exception as error:
                if node["NodeID"] not in {each["NodeID"] for each in self._nodes()}:
                    continue  # it has left in the meantime
                reason = _first_line(getattr(error, "cause", None) or error)
                raise InputError(
                    f"the machine {machine} cannot work for spalm ({reason}); install the same spalm there"
                ) from None
            if seen != file.read_text():
                raise InputError(
                    f"{file.parent} is not shared: the machine {machine} does not see what is there; put it on storage "
                    "that all machines mount under the same path"
                )


def _near(part: Part, others: Iterable[Part], lead: int) -> bool:
    """Whether it is not too far ahead of the slowest: where results count in order, a kill loses those in between."""
    return all(part.number - other.number < lead for other in others)


def _do(common: list[Any], part: Part, threads: int) -> Any:
    """In a worker of Ray's."""
    compute_with(threads)
    return _job(common[0])(part, lambda _: None)


@lru_cache(maxsize=1)
def _job(reference: Any) -> Job:
    import ray

    return ray.get(reference)


def _seen(path: str) -> str | None:
    return Path(path).read_text() if Path(path).exists() else None


def _library() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of parts that nobody waits for when another has failed
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise InputError("the engine ray needs its library: pip install 'spalm[ray]'") from None
    # What it has to tell of lost machines it prints, pages of it, where our results go; there is no switch for that.
    ray._private.worker.print_to_stdstream = _say
    return ray


def _say(message: dict[str, Any], **_: Any) -> None:
    for line in " ".join(message["lines"]).splitlines()[:1]:
        say(f"ray: {line[:200]}")


def _start(ray: Any, address: str | None, threads: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(address="local", num_cpus=threads or cores_here(), include_dashboard=False, **quiet)
        else:
            _refuse_unless_answered(address)
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, AssertionError) as error:
        where = "Ray does not start here" if address is None else f"--address {address}: the cluster cannot be joined"
        raise InputError(f"{where} ({_first_line(error)})") from None


def _refuse_unless_answered(address: str) -> None:
    """Complains unless a Ray cluster answers there, and soon."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise InputError(f"--address {address}: give host:port of a Ray cluster, or auto")
        try:
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"--address {address}: nothing answers there ({_first_line(error)})") from None
    # Whether Ray does is asked in a process that can be given up.
    ask = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        answered = subprocess.run(ask, capture_output=True, timeout=_ANSWER_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        answered = False
    if not answered:
        raise InputError(f"--address {address}: no Ray cluster answers there, or none of this version of Ray")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
