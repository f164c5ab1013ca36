"""The engine of many machines: Ray does the scheduling, and does a part again whose worker was lost.

Without an address, Ray is started for this command alone, with the cores of this machine. A job is put into Ray's store
once, and each worker process keeps the last one it was given, with what that has opened.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from spalm.console import say
from spalm.engine.contract import Job, Part, Told
from spalm.engine.local import compute_with
from spalm.errors import InputError

_RETRIES = 8
"""How often a part is done again whose worker was lost."""
_AHEAD = 2
"""Parts given to Ray for each one that can be at work."""
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
            sizes = [int(node["Resources"].get("CPU", 0)) for node in self._nodes()]
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

    def close(self) -> None:
        """Ends what was started for this command; a cluster that was joined is left as it is."""
        self._ray.shutdown()

    def each(
        self, job: Job, tasks: Iterable[Part], told: Told, at_once: int, threads: int
    ) -> Iterator[tuple[Part, Any]]:
        cores = max(threads, -(-self.cores // at_once))
        gpus = getattr(job, "gpus", 0)
        run = self._ray.remote(_do).options(num_cpus=cores, num_gpus=gpus, max_retries=_RETRIES)
        common = self._ray.put(job)
        waiting: dict[Any, Part] = {}
        left, most = iter(tasks), _AHEAD * max(1, self.slots // cores)
        try:
            while True:
                for part in islice(left, most - len(waiting)):
                    waiting[run.remote([common], part, threads)] = part
                if not waiting:
                    return
                for done in self._ray.wait(list(waiting))[0]:
                    part = waiting.pop(done)
                    result = self._result(done)
                    told(len(part))
                    yield part, result
        finally:
            for reference in waiting:
                self._ray.cancel(reference, force=True)

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
        path, token = folder / f".shared-{secrets.token_hex(8)}", secrets.token_hex(16)
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        path.write_text(token)
        try:
            asked = []
            for node in self._nodes():
                there = strategy(node["NodeID"], soft=False)
                look = self._ray.remote(_seen).options(num_cpus=0, scheduling_strategy=there)
                asked.append((node, look.remote(str(path))))
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
                if seen != token:
                    raise InputError(
                        f"{folder} is not shared: the machine {machine} does not see what is written there; choose an "
                        "--out on storage that all machines mount under the same path"
                    )
        finally:
            path.unlink(missing_ok=True)


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
    say(f"ray: {' '.join(message['lines']).splitlines()[0][:200]}")


def _start(ray: Any, address: str | None, threads: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            cores = threads or torch.get_num_threads()
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
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
