"""A finished run on disk to an explorer of it."""

from collections.abc import Callable

import numpy as np
import torch

from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.learning import Hardware
from spalm.lm import Reading
from spalm.memory import MemorySettings, encoder_of
from spalm.neighbours import Searcher, make_searcher, open_searcher
from spalm.semiparametric import (
    Combiner,
    FinishedRun,
    HeldOut,
    Knn,
    Plain,
    ThroughGate,
    WithKnn,
    WithMixture,
    load_mixture,
)
from spalm.serving.explorer import Base, Explorer, Speaker

_INDEX = "index"
_RECALL = 0.95
_QUERIES = 64
"""Searched for together: candidates of each are compared by whole keys."""
_FEW = 100_000
"""Entries that are searched one by one faster than anybody waits for."""


def open_explorer(run: FinishedRun, hardware: Hardware) -> Explorer:
    """Loads the models; the first time, makes an index of the memory for texts that are not in the run's table."""
    device = hardware.prepare()
    memory_settings = MemorySettings.parse(run.recipe["memory"], "memory")
    encoder = encoder_of(run.trained("transformer"), memory_settings, lambda: device)
    run.memory.refuse_others({**encoder.identity, "width": run.memory.width})
    count = run.neighbours.array("dev.ids").shape[1]
    searcher = _searcher(run, min(count, 16))

    def find(stream: TokenStream) -> tuple[np.ndarray, np.ndarray]:
        keys = encoder.keys(stream, 0, len(stream), run.memory.keys_of, run.memory.width).astype(np.float32)
        parts = [searcher.search(keys[start : start + _QUERIES], count) for start in range(0, len(keys), _QUERIES)]
        ids, distances = zip(*parts)
        return np.concatenate(ids), np.concatenate(distances)

    def known(split: HeldOut, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return run.neighbours.read(split, rows)

    return Explorer(run.title, run.corpus, run.memory, _speakers(run, device), find, known, device)


def _speakers(run: FinishedRun, device: torch.device) -> Callable[[HeldOut, int], list[Speaker]]:
    """All models of the run; the adaptive mixture is the one that scored the position in the records."""
    spalm = run.trained("spalm").load(device).attend_to(run.records("spalm").settings["neighbours"])
    networks = {
        "transformer": run.trained("transformer").load(device),
        "transformer-xl": run.trained("transformer-xl").load(device),
        "spalm": spalm.base,
    }
    bases = {name: Base(name, network, _reading(run, name)) for name, network in networks.items()}
    gate = ThroughGate(spalm.gate)

    def knn(name: str, inner: Combiner) -> WithKnn:
        return WithKnn(inner, Knn(**run.records(name).facts["knn"]))

    adaptive = run.records("spalm-adaptive")
    always = [
        Speaker("transformer", bases["transformer"], Plain()),
        Speaker("transformer-xl", bases["transformer-xl"], Plain()),
        Speaker("knn-lm", bases["transformer-xl"], knn("knn-lm", Plain())),
        Speaker("spalm", bases["spalm"], gate),
        Speaker("spalm+knn", bases["spalm"], knn("spalm+knn", gate)),
    ]

    def speakers(split: HeldOut, position: int) -> list[Speaker]:
        mixture = load_mixture(adaptive, split, position).to(device)
        return [*always, Speaker("spalm-adaptive", bases["spalm"], WithMixture(gate, mixture))]

    return speakers


def _reading(run: FinishedRun, name: str) -> Reading:
    """As the records of that model were read."""
    settings = run.records(name).settings
    model = run.trained(name).model_settings
    return Reading.of(
        model.network.layers,
        model.training.segment_length,
        settings["memory_length"],
        settings["lanes"],
        settings["stride"],
    )


def _searcher(run: FinishedRun, judged: int) -> Searcher:
    where = run.directory / _INDEX
    try:
        return open_searcher(run.memory, where)[0]
    except InputError:
        kind = "exact" if len(run.memory.entries()) <= _FEW else "faiss"
        return make_searcher(run.memory, kind, where, _RECALL, judged, seed=1)[0]
