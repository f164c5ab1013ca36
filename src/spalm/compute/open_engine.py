"""Opens an engine by its name. Ray is imported only if its engine is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

from spalm.choices import EngineName
from spalm.compute.engine import Engine
from spalm.compute.local_engine import LocalEngine
from spalm.errors import InputError


@contextmanager
def open_engine(name: EngineName, address: str | None = None, threads: int | None = None) -> Iterator[Engine]:
    """Starts or joins an engine and yields it; closes it at the end."""
    if threads is not None and threads < 1:
        raise InputError(f"--threads {threads}: give 1 or more")
    if name == "local":
        if address is not None:
            raise InputError(f"--address {address}: the local engine has none; give --engine ray too")
        yield LocalEngine(threads)
        return
    from spalm.compute.ray_engine import RayEngine

    engine = RayEngine(address, threads)
    try:
        yield engine
    finally:
        engine.close()
