"""The study as a whole: its sizes, the folder it works in, and parts that are made once and then read."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import spalm
from footballers import smollm2
from spalm.attachment import Attached, AttachSettings
from spalm.attachment import attach as attach_memory
from spalm.compute import Execution
from spalm.console import say
from spalm.digests import digest_of_json
from spalm.errors import InputError
from spalm.files import write_json
from spalm.generation.hugging_face import export_for_transformers
from spalm.lm.pretrained import locate_pretrained

SEED = 1
"""Seed of every random choice of the study."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything is read. The defaults are those of the whole study."""

    domains: list[str]
    """Domains that have curves; the memory of the first is used where one is enough."""
    keys: list[int] = field(default_factory=lambda: [10_000, 100_000, 1_000_000])
    """Numbers of entries with keys."""
    exact: list[int] = field(default_factory=lambda: [100_000, 1_000_000, 10_000_000, 30_000_000])
    """Numbers of tokens with exact matches."""
    beside: int = 100_000
    """Number of entries with keys where the number of exact matches varies, or something else."""
    core: int = 130_000
    """Number of tokens of the documents that are divided into train, dev and test, about."""
    positions: int = 24_000
    """Number of positions that a mixture learns from."""
    held_out: int = 20_000
    """Highest number of positions of dev, and of test."""
    compared: int = 4
    """Number of domains beside LoRA and RAG."""
    ranks: list[int] = field(default_factory=lambda: [8, 32, 128])
    rates: list[float] = field(default_factory=lambda: [3e-4, 1e-3, 3e-3])
    """Ranks and learning rates that LoRA is tuned over."""
    doublings: int = 5
    """How often LoRA's budget may be doubled while it still improves."""
    retrievers: int = 16
    """Number of settings of in-context retrieval that are tried on dev."""
    retriever_tokens: int = 4_000
    """Number of positions of dev on which they are tried."""
    own_text: int = 3072
    """Number of tokens that the model writes for the mixture to learn from."""
    problems: int = 1000
    """Highest number of questions of PIQA, and of problems of GSM8K."""
    questions: int = 1000
    """Highest number of questions of XQuAD, half of them to tune on."""
    speeds: int = 8
    """Number of prompts that are continued to measure speeds."""

    @property
    def of_memory(self) -> list[int]:
        """Those on which a memory of a domain depends, beside the numbers of entries."""
        return [self.core, self.positions, self.held_out, self.own_text]

    @classmethod
    def quick(cls, domains: list[str]) -> "Sizes":
        """Returns sizes with which everything runs in about half a core-hour."""
        return cls(
            domains=domains,
            keys=[2_000, 8_000],
            exact=[10_000, 300_000],
            beside=2_000,
            core=10_000,
            positions=3_000,
            held_out=2_000,
            compared=1,
            ranks=[8],
            rates=[1e-3, 3e-3],
            doublings=1,
            retrievers=3,
            retriever_tokens=600,
            own_text=768,
            problems=60,
            questions=32,
            speeds=2,
        )


@dataclass
class Clock:
    """Time that some work took."""

    seconds: float = 0.0
    core_seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what happens within."""
        begun = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun[0]
            self.core_seconds += time.process_time() - begun[1]


class Study:
    """The folder in which the study works; what was made there is not made again."""

    def __init__(self, directory: Path, data: Path, sizes: Sizes, *, model: str | None = None):
        """`model` is the folder, GGUF file or name of a pretrained model; None: SmolLM2-135M."""
        self.directory, self.data, self.sizes = directory, data, sizes
        self._model = model
        directory.mkdir(parents=True, exist_ok=True)

    def made(self, name: str, identity: Any, make: Callable[[], dict]) -> dict:
        """Returns a result that is kept in a file, made anew where it was made with another `identity`."""
        path, digest = self.directory / "made" / f"{name}.json", digest_of_json(json.loads(json.dumps(identity)))
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["identity"] == digest:
                return known["result"]
        say(f"proof: {name}")
        result = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"identity": digest, "given": identity, "result": result})
        return json.loads(path.read_text(encoding="utf-8"))["result"]

    @cached_property
    def model(self) -> Path:
        """Folder of the pretrained model."""
        return locate_pretrained(self._model or str(smollm2()), self.directory / "base").path

    def settings(self, **given: Any) -> AttachSettings:
        """Returns the settings with which the study attaches memories."""
        names = ("positions", "held_out", "own_text")
        sizes = {**{name: getattr(self.sizes, name) for name in names}, "seed": SEED}
        return AttachSettings(memory=given.pop("memory", "both"), **{**sizes, **given})

    def attach(
        self, name: str, texts: list[Path], settings: AttachSettings, *, model: Path | None = None
    ) -> tuple[Attached, dict[str, float]]:
        """Returns a model with a memory, and the time that attaching it took, over all attempts if one was stopped."""
        folder, record = self.directory / "memories" / name, self.directory / "memories" / f"{name}.json"
        identity = [[str(path) for path in texts], settings.as_json(), str(model)]
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {"finished": False}
        if known.get("identity", identity) != identity:
            raise InputError(f"{folder} was made with other sizes; remove {self.directory} or give another --out")
        clock = Clock(known.get("seconds", 0.0), known.get("core_seconds", 0.0))
        if not known["finished"]:
            base = model or self.model  # converted before the clock runs
            finished = False
            try:
                with clock.running():
                    attached = attach_memory(str(base), texts, folder, settings=settings, execution=Execution())
                export_for_transformers(attached)
                finished = True
            finally:
                record.parent.mkdir(parents=True, exist_ok=True)
                write_json(record, {"identity": identity, "finished": finished, **asdict(clock)})
        return Attached(folder, Execution().hardware), asdict(clock)

    def load(self, attached: Attached) -> spalm.Model:
        """Opens a model with a memory for generation."""
        return spalm.load(attached.directory, execution=Execution())
