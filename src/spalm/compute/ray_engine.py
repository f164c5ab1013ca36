"""The engine of many machines: Ray schedules the parts, and repeats a part whose worker was lost.

Without an address, Ray is started for this command alone, with the cores of this machine. A job is put into Ray's store
once, and each worker process keeps the last one that it received, with what that job has opened.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from spalm.compute.engine import Job, JobPart, ProgressCallback
from spalm.compute.threads import available_cores, set_threads
from spalm.console import say
from spalm.errors import InputError, first_line

_RETRIES = 8
"""Number of times that a part is repeated if its worker is lost."""
_AHEAD = 2
"""Parts given to Ray for each one that can run at a time."""
_LEAD = 8
"""Largest lead over the slowest part, in multiples of the parts that are given to Ray at a time."""
_CHECK_SECONDS = 30
"""Seconds without a result after which the engine checks whether there are machines at all."""
_CONNECT_SECONDS, _ANSWER_SECONDS = 5, 30
"""Seconds to wait for a connection to an address, and for Ray's answer: Ray itself would wait a quarter of an hour."""
_PROBE_SECONDS = 120
"""Seconds that a machine may take to start a worker and read a file."""


class RayEngine:
    """Runs the parts of a job on a Ray cluster."""

    separate_processes = True

    def __init__(self, address: str | None = None, threads: int | None = None):
        self._ray = _import_ray()
        self.requested_threads = threads
        _start(self._ray, address, threads)
        try:
            sizes = self._sizes()
            self.machines = sum(size > 0 for size in sizes)
            if not self.machines:
                raise InputError(f"--address {address}: that Ray cluster has no cores to work with; add nodes to it")
            self.total_cores, self.cores = sum(sizes), max(sizes)
            self.threads = threads or min(size for size in sizes if size)
            if self.threads > self.cores:
                raise InputError(
                    f"--threads {self.threads}: the machines at {address} have at most {self.cores} core(s); give fewer"
                )
        except BaseException:
            self.close()
            raise

    def _nodes(self) -> list[dict[str, Any]]:
        """Returns Ray's descriptions of the machines that are alive."""
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _sizes(self) -> list[int]:
        """Returns the number of cores of each machine."""
        return [int(node["Resources"].get("CPU", 0)) for node in self._nodes()]

    def close(self) -> None:
        """Ends the Ray that was started for this command; leaves a cluster that was joined as it is."""
        self._ray.shutdown()

    def run_parts(
        self,
        job: Job,
        parts: Iterable[JobPart],
        progress: ProgressCallback,
        *,
        threads: int,
        per_machine: int | None = None,
    ) -> Iterator[tuple[JobPart, Any]]:
        """Does all parts; none gets far ahead of the slowest, so that a killed run loses little."""
        cores = threads if per_machine is None else max(threads, -(-self.cores // per_machine))
        gpus = getattr(job, "gpus", 0)
        run = self._ray.remote(_run_part).options(num_cpus=cores, num_gpus=gpus, max_retries=_RETRIES)
        stored = self._ray.put(job)
        running: dict[Any, JobPart] = {}
        left, most = deque(parts), _AHEAD * max(1, self.total_cores // cores)
        try:
            while left or running:
                while left and len(running) < most and _is_near(left[0], running.values(), _LEAD * most):
                    part = left.popleft()
                    running[run.remote([stored], part, threads)] = part
                done, _ = self._ray.wait(list(running), timeout=_CHECK_SECONDS)
                if not done:
                    self._refuse_unless_cores(cores)
                for reference in done:
                    part = running.pop(reference)
                    result = self._result(reference)
                    progress(len(part))
                    yield part, result
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def _refuse_unless_cores(self, cores: int) -> None:
        """Raises an error if the machines that are left are all too small: Ray would wait for others for ever."""
        if max(self._sizes(), default=0) < cores:
            raise InputError(
                f"no machine of the Ray cluster is left that has {cores} core(s); run the same command again to go on, "
                "with fewer --threads or more machines"
            )

    def _result(self, reference: Any) -> Any:
        """Returns what a task returned; raises what it raised, as if it had been raised here."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise getattr(error, "cause", None) or error from None
        except errors.RayError as error:
            raise InputError(
                f"Ray gave up a task after {_RETRIES + 1} workers were lost on it ({first_line(error)}); look at the "
                "machines' memory, then run the same command to go on"
            ) from None

    def refuse_unless_shared(self, folder: Path) -> None:
        """Raises an error unless every machine sees what is written into `folder`."""
        path = folder / f".shared-{secrets.token_hex(8)}"
        path.write_text(secrets.token_hex(16), encoding="utf-8")
        try:
            self.refuse_unless_visible(path)
        finally:
            path.unlink(missing_ok=True)

    def refuse_unless_visible(self, file: Path) -> None:
        """Raises an error unless every machine sees this text file with the same content."""
        probes, strategy = [], self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for node in self._nodes():
            there = strategy(node["NodeID"], soft=False)
            look = self._ray.remote(_content).options(num_cpus=0, scheduling_strategy=there)
            probes.append((node, look.remote(str(file))))
        for node, reference in probes:
            machine = node["NodeManagerAddress"]
            try:
                seen = self._ray.get(reference, timeout=_PROBE_SECONDS)
            except Exception as error:
                if node["NodeID"] not in {each["NodeID"] for each in self._nodes()}:
                    continue  # the machine has left the cluster in the meantime
                reason = first_line(getattr(error, "cause", None) or error)
                raise InputError(
                    f"the machine {machine} cannot work for spalm ({reason}); install the same spalm there"
                ) from None
            if seen != file.read_text(encoding="utf-8"):
                raise InputError(
                    f"{file.parent} is not shared: the machine {machine} does not see what is there; put it on storage "
                    "that all machines mount under the same path"
                )


def _is_near(part: JobPart, others: Iterable[JobPart], lead: int) -> bool:
    """Whether a part is less than `lead` parts ahead of the others.

    Where results are used in order, a kill loses those that are ahead.
    """
    return all(part.number - other.number < lead for other in others)


def _run_part(job: list[Any], part: JobPart, threads: int) -> Any:
    """Does a part in a worker of Ray. The job comes in a list, so that Ray passes its reference instead of a copy."""
    set_threads(threads)
    return _job(job[0])(part, lambda _: None)


@lru_cache(maxsize=1)
def _job(reference: Any) -> Job:
    """Returns the job behind a reference; the last one stays in the worker."""
    import ray

    return ray.get(reference)


def _content(path: str) -> str | None:
    """Returns the content of a text file as a worker sees it; None: there is no such file."""
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else None


def _import_ray() -> Any:
    """Imports Ray and makes it quiet."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # in parts that nobody waits for after another has failed
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray = import_module("ray")
        import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise InputError("the engine ray needs its library: pip install 'spalm[ray]'") from None
    # Ray prints pages about lost machines to where our results go, and has no switch against that.
    sys.modules["ray._private.worker"].print_to_stdstream = _print_first_line  # pyright: ignore[reportAttributeAccessIssue]
    return ray


def _print_first_line(message: dict[str, Any], **_: Any) -> None:
    """Prints the first line of a message of Ray on our console."""
    for line in " ".join(message["lines"]).splitlines()[:1]:
        say(f"ray: {line[:200]}")


def _start(ray: Any, address: str | None, threads: int | None) -> None:
    """Joins the cluster at `address`, or starts Ray on this machine."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(address="local", num_cpus=threads or available_cores(), include_dashboard=False, **quiet)
        else:
            _refuse_unless_answered(address)
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, AssertionError) as error:
        where = "Ray does not start here" if address is None else f"--address {address}: the cluster cannot be joined"
        raise InputError(f"{where} ({first_line(error)})") from None


def _refuse_unless_answered(address: str) -> None:
    """Raises an error unless a Ray cluster answers at `address`, and soon."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise InputError(f"--address {address}: give host:port of a Ray cluster, or auto")
        try:
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"--address {address}: nothing answers there ({first_line(error)})") from None
    # Ray's own status command runs in a process, which can be ended if it takes too long.
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        answered = subprocess.run(command, capture_output=True, timeout=_ANSWER_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        answered = False
    if not answered:
        raise InputError(f"--address {address}: no Ray cluster answers there, or none of this version of Ray")
