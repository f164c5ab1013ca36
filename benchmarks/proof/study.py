"""The study as a whole: its sizes, the folder it works in, and parts that are made once and then read."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from threading import Event, Thread
from typing import Any

import spalm
from footballers import smollm2
from spalm.attachment import Attached, AttachSettings
from spalm.attachment import attach as attach_memory
from spalm.compute import Execution, Hardware, has_bf16
from spalm.console import say
from spalm.digests import digest_of_file, digest_of_json
from spalm.errors import InputError
from spalm.files import write_json
from spalm.generation.hugging_face import export_for_transformers
from spalm.lm.pretrained import locate_pretrained

SEED = 1
"""Seed of every random choice of the study."""
VERSION = 2
"""Version of the code that makes results: what was made with another one is made anew."""
_TEST_SHARE = 0.2
"""Share of the documents on which everything is measured: twice the usual, because intervals are over documents."""
_RECORD_EVERY = 10.0
"""Seconds between two records of the time that some work has taken so far."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything is read. The defaults are those of the whole study."""

    domains: list[str]
    """Domains that have curves; the memory of the first is used where one is enough."""
    keys: list[int] = field(default_factory=lambda: [10_000, 100_000, 300_000])
    """Numbers of entries with keys."""
    exact: list[int] = field(default_factory=lambda: [0, 3_000_000, 30_000_000])
    """Numbers of tokens with exact matches; 0: those of the core alone."""
    core: int = 100_000
    """Number of tokens of the documents that are divided into train, dev and test, about. So many entries have keys
    where the number of exact matches varies."""
    positions: int = 12_000
    """Number of positions that a mixture learns from."""
    held_out: int = 20_000
    """Highest number of positions of dev, and of test."""
    own_text: int = 12_288
    """Number of tokens that the model writes for the mixture to learn from, the same in all parts."""
    compared: int = 4
    """Number of domains beside LoRA and RAG."""
    compared_core: int = 40_000
    """Number of tokens of the core there."""
    compared_positions: int = 8_000
    """Number of positions that a mixture learns from there, and the highest number of those of dev, and of test."""
    ranks: list[int] = field(default_factory=lambda: [8, 32])
    rates: list[float] = field(default_factory=lambda: [1e-3, 3e-3])
    """Ranks and learning rates that LoRA is tuned over."""
    doublings: int = 2
    """How often LoRA's budget may be doubled while it still improves."""
    retrievers: int = 9
    """Number of settings of in-context retrieval that are tried on dev."""
    speeds: int = 8
    """Number of prompts that are continued to measure speeds, and of documents that are added and forgotten."""
    tuning: int = 100
    """Number of questions of XQuAD to tune on."""
    questions: int = 1000
    """Highest number of questions of XQuAD to report on."""
    other_text: int = 8_000
    """Number of tokens of each text that has nothing to do with the memory."""
    harm_library: int = 3_000_000
    """Number of tokens of the library of the second memory there, if no memory of the curves is there."""
    piqa: int = 1000
    """Highest number of questions of PIQA."""
    gsm8k: int = 300
    """Highest number of problems of GSM8K."""
    forgotten: int = 32
    """Number of documents that are forgotten, and of those that they are compared with."""

    @classmethod
    def quick(cls, domains: list[str]) -> "Sizes":
        """Returns sizes with which everything runs in about half a core-hour."""
        return cls(
            domains=domains,
            keys=[2_000, 8_000],
            exact=[0, 300_000],
            core=10_000,
            positions=3_000,
            held_out=2_000,
            own_text=768,
            compared=1,
            compared_core=8_000,
            compared_positions=2_000,
            ranks=[8],
            doublings=1,
            retrievers=3,
            speeds=2,
            tuning=12,
            questions=16,
            other_text=800,
            harm_library=100_000,
            piqa=60,
            gsm8k=20,
            forgotten=4,
        )


@dataclass
class Clock:
    """Time that some work took."""

    seconds: float = 0.0
    core_seconds: float = 0.0

    @contextmanager
    def running(self, record: Callable[[], None] | None = None) -> Iterator[None]:
        """Counts what happens within; `record` is called every few seconds, so that a kill loses no more than that."""
        before, begun = (self.seconds, self.core_seconds), (time.perf_counter(), time.process_time())
        stopped = Event()

        def count() -> None:
            self.seconds = before[0] + time.perf_counter() - begun[0]
            self.core_seconds = before[1] + time.process_time() - begun[1]
            if record is not None:
                record()

        def keep_counting() -> None:
            while not stopped.wait(_RECORD_EVERY):
                count()

        counting = Thread(target=keep_counting, daemon=True)
        counting.start()
        try:
            yield
        finally:
            stopped.set()
            counting.join()
            count()


class Study:
    """The folder in which the study works; what was made there is not made again."""

    def __init__(self, directory: Path, data: Path, sizes: Sizes, *, model: str | None = None):
        """`model` is the folder, GGUF file or name of a pretrained model; None: SmolLM2-135M."""
        self.directory, self.data, self.sizes = directory, data, sizes
        self._model = model
        self._is_warm = False
        directory.mkdir(parents=True, exist_ok=True)

    def made(self, name: str, identity: Any, make: Callable[[], Any]) -> Any:
        """Returns a result that is kept in a file, made anew where it was made with another `identity`."""
        given = [VERSION, self._model, identity]
        path, digest = self.directory / "made" / f"{name}.json", digest_of_json(json.loads(json.dumps(given)))
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["identity"] == digest:
                return known["result"]
        say(f"proof: {name}")
        result = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"identity": digest, "given": given, "result": result})
        return json.loads(path.read_text(encoding="utf-8"))["result"]

    @cached_property
    def model(self) -> Path:
        """Folder of the pretrained model."""
        return locate_pretrained(self._model or str(smollm2()), self.directory / "base").path

    @cached_property
    def execution(self) -> Execution:
        """How all models of the study are run.

        If the backend were the one that is measured to be the fastest, points of one curve could be of different ones.
        """
        return Execution(Hardware(**self.hardware))

    @cached_property
    def hardware(self) -> dict[str, Any]:
        """The backend that runs the models and its precision, as it was chosen when the study was begun."""
        path = self.directory / "hardware.json"
        if not path.exists():
            write_json(path, {"backend": "torch", "precision": "bfloat16" if has_bf16() else "float32"})
        return json.loads(path.read_text(encoding="utf-8"))

    def settings(self, **given: Any) -> AttachSettings:
        """Returns the settings with which the study attaches memories."""
        names = ("positions", "held_out", "own_text")
        sizes = {**{name: getattr(self.sizes, name) for name in names}, "seed": SEED, "test_share": _TEST_SHARE}
        return AttachSettings(memory="both", **{**sizes, **given})

    def attach(
        self, name: str, texts: list[Path], settings: AttachSettings, *, model: Path | None = None
    ) -> tuple[Attached, dict[str, float]]:
        """Returns a model with a memory, and the time that attaching it took, over all attempts if one was stopped."""
        folder, record = self._places(name)
        contents = [digest_of_file(Path(path)) for path in [*texts, *settings.library]]
        identity = [VERSION, self._model, contents, settings.as_json(), str(model)]
        known = _read_record(record)
        if known.get("identity", identity) != identity:
            raise InputError(f"{folder} was made with other texts or sizes; remove it and {record.name} beside it")
        clock = Clock(known.get("seconds", 0.0), known.get("core_seconds", 0.0))

        def write(*, finished: bool) -> None:
            record.parent.mkdir(parents=True, exist_ok=True)
            write_json(record, {"identity": identity, "finished": finished, **asdict(clock)})

        if not known["finished"]:
            base = model or self.model  # converted before the clock runs
            self._warm_up()
            with clock.running(lambda: write(finished=False)):
                attached = attach_memory(str(base), texts, folder, settings=settings, execution=self.execution)
            export_for_transformers(attached)
            write(finished=True)
        return Attached(folder, self.execution.hardware), asdict(clock)

    def finished(self, name: str) -> Attached | None:
        """Returns a model with a memory that was attached before; None: there is none of this name."""
        folder, record = self._places(name)
        return Attached(folder, self.execution.hardware) if _read_record(record)["finished"] else None

    def remove(self, name: str) -> None:
        """Removes a memory that is not needed any more."""
        folder, record = self._places(name)
        record.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _places(self, name: str) -> tuple[Path, Path]:
        """Returns the folder of a memory, and the file that says how long attaching it took."""
        return self.directory / "memories" / name, self.directory / "memories" / f"{name}.json"

    def _warm_up(self) -> None:
        """Attaches a small memory once in this process, so that no clock counts imports and compilation."""
        if self._is_warm:
            return
        folder = self.directory / "warm-up"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        texts = folder / "texts.jsonl"
        lines = [json.dumps({"id": name, "text": text[:1000]}) + "\n" for name, text in [*topics.items()][:16]]
        texts.write_text("".join(lines), encoding="utf-8")
        settings = self.settings(positions=512, held_out=512, own_text=0)
        say("proof: a small memory is attached to warm up")
        attach_memory(str(self.model), [texts], folder / "memory", settings=settings, execution=self.execution)
        shutil.rmtree(folder)
        self._is_warm = True

    def load(self, attached: Attached) -> spalm.Model:
        """Opens a model with a memory for generation."""
        return spalm.load(attached.directory, execution=self.execution)


def _read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"finished": False}
