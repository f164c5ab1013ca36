"""A finished run on disk to an explorer of it."""

from collections.abc import Callable

import numpy as np
import torch

from spalm.compute import Hardware
from spalm.corpus import TokenStream
from spalm.generation.explorer import Base, Explorer, Speaker
from spalm.lm import Reading
from spalm.memory import encoder_of
from spalm.runs import FinishedRun, HeldOut, load_mixture, mixture_file
from spalm.semiparametric import Combiner, GateCombiner, Knn, KnnCombiner, MixtureCombiner, PlainCombiner, open_search

INDEX = "index"


def open_explorer(run: FinishedRun, hardware: Hardware) -> Explorer:
    """Loads the models; the first time, makes an index of the memory for texts that are not in the run's table."""
    device = hardware.prepare()
    encoder = encoder_of(run.network("transformer"), run.recipe.memory, lambda: device)
    run.memory.require_same_keys({**encoder.identity, "width": run.memory.width})
    count = run.neighbours.array("dev.ids").shape[1]
    search = open_search(run.memory, run.directory / INDEX, count)

    def find(stream: TokenStream) -> tuple[np.ndarray, np.ndarray]:
        return search.find(encoder.keys(stream, 0, len(stream), run.memory.keys_of, run.memory.width))

    def known(split: HeldOut, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return run.neighbours.read(split, rows)

    return Explorer(run.title, run.corpus, run.memory, speakers_of(run, device), find, known, device)


def speakers_of(run: FinishedRun, device: torch.device) -> Callable[[HeldOut, int], list[Speaker]]:
    """All models of the run; the adaptive mixture is the one that scored the position in the records."""
    spalm = run.network("spalm").load(device).set_neighbours(run.records("spalm").settings["neighbours"])
    networks = {
        "transformer": run.network("transformer").load(device),
        "transformer-xl": run.network("transformer-xl").load(device),
        "spalm": spalm.base,
    }
    bases = {name: Base(name, network, reading_of(run, name)) for name, network in networks.items()}
    gate = GateCombiner(spalm.gate)

    def knn(name: str, inner: Combiner) -> KnnCombiner:
        return KnnCombiner(inner, Knn(**run.records(name).facts["knn"]))

    adaptive = run.records("spalm-adaptive")
    always = [
        Speaker("transformer", bases["transformer"], PlainCombiner()),
        Speaker("transformer-xl", bases["transformer-xl"], PlainCombiner()),
        Speaker("knn-lm", bases["transformer-xl"], knn("knn-lm", PlainCombiner())),
        Speaker("spalm", bases["spalm"], gate),
        Speaker("spalm+knn", bases["spalm"], knn("spalm+knn", gate)),
    ]

    def speakers(split: HeldOut, position: int) -> list[Speaker]:
        mixture = load_mixture(adaptive, mixture_file(adaptive, split, position)).to(device)
        return [*always, Speaker("spalm-adaptive", bases["spalm"], MixtureCombiner(gate, mixture))]

    return speakers


def reading_of(run: FinishedRun, name: str) -> Reading:
    """As the records of that model were read."""
    settings = run.records(name).settings
    model = run.network(name).model_settings
    return Reading.of(
        model.network.layers,
        model.training.segment_length,
        settings["memory_length"],
        settings["lanes"],
        settings["stride"],
    )
