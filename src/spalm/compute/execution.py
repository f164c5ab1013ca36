"""Execution: how and where work runs, as one object that is passed from the command line to every stage."""

from dataclasses import dataclass, field
from importlib.util import find_spec

from spalm.compute.engine import Engine
from spalm.compute.hardware import Hardware
from spalm.compute.local_engine import LocalEngine
from spalm.errors import InputError


@dataclass(frozen=True)
class Execution:
    """Switches of one command. They change how fast an artifact is made, not what it is."""

    hardware: Hardware = field(default_factory=Hardware)
    """Device, threads and ranks."""
    cluster: Engine | None = None
    """Engine that makes keys and searches for neighbours; None: the threads of this machine."""
    ram: int | None = None
    """Bytes that the search for neighbours may use on a machine; None: half of this machine's memory."""
    restart: bool = False
    """Whether unfinished stages begin again from nothing."""
    tensorboard: bool = False
    """Whether training also logs to TensorBoard."""

    def __post_init__(self) -> None:
        """Refuses what cannot be used here before any stage is touched."""
        self.hardware.refuse_unless_usable()
        if self.tensorboard and find_spec("tensorboard") is None:
            raise InputError("--tensorboard needs the extra: pip install 'spalm[tensorboard]'")

    @property
    def engine(self) -> Engine:
        """The cluster, or the threads of this machine."""
        return self.cluster or LocalEngine(self.hardware.threads)
