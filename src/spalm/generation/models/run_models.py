"""The models of a finished run: every row of its results."""

from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
import torch

from spalm.compute import Hardware
from spalm.generation.models.model_set import ModelSet, Neighbours, Network, Variant
from spalm.lm import Reading, Transformer
from spalm.memory import Encoder, encoder_of
from spalm.runs import (
    ROWS,
    FinishedRun,
    HeldOut,
    NetworkName,
    Row,
    RowName,
    load_mixture,
    mixture_file,
)
from spalm.semiparametric import (
    AdaptiveMixture,
    Combiner,
    Gate,
    GateCombiner,
    Knn,
    KnnCombiner,
    MixtureCombiner,
    PlainCombiner,
    Search,
    Spalm,
    open_search,
)

_INDEX = "index"
_MIXTURES = 9
"""Number of adaptive mixtures of a run that are kept loaded. Each row has three: one for each half of dev, and one for
everything else."""


class RunModels(ModelSet):
    """The models of a run. Networks are loaded, and the index made if there is none, when they are first used."""

    def __init__(self, run: FinishedRun, hardware: Hardware):
        self.run, self._hardware = run, hardware
        self.directory, self.title, self.default = run.directory, run.title, run.default_row
        self.corpus, self.memory = run.corpus, run.memory
        self._loaded: dict[NetworkName, tuple[Transformer, Gate | None]] = {}
        self._networks: dict[RowName, Network] = {}
        self._mixture = lru_cache(_MIXTURES)(self._load_mixture)

    @property
    def names(self) -> list[str]:
        return list(self.run.rows)

    def model_name(self, variant: str) -> str:
        return f"{self.directory.resolve().name}/{variant}"

    @cached_property
    def device(self) -> torch.device:
        return self._hardware.prepare()

    @cached_property
    def encoder(self) -> Encoder:
        made = encoder_of(self.run.network("transformer"), self.run.recipe.memory, lambda: self.device)
        self.memory.require_same_keys({**made.identity, "width": self.memory.width})
        return replace(made, load=lambda: self._network("transformer").model)

    @cached_property
    def search(self) -> Search:
        count = self.run.neighbours.array("dev.ids").shape[1]
        return open_search(self.memory, self.directory / _INDEX, count)

    def neighbours_of_split(self, split: HeldOut, rows: np.ndarray) -> Neighbours:
        return self.run.neighbours.read(split, rows)

    def variant(self, name: str, split: HeldOut = "test", position: int = 0) -> Variant:
        row = ROWS[name]  # pyright: ignore[reportArgumentType]
        reading = row.network if row.mixture else row.name
        return Variant(name, self._network(reading), self._combiner(row, split, position))

    def _network(self, name: RowName) -> Network:
        """Returns the network of a row without a mixture, and how it was read for that row."""
        if name not in self._networks:
            model, _ = self._load(ROWS[name].network)
            self._networks[name] = Network(name, model, self._reading(name))
        return self._networks[name]

    def _load(self, name: NetworkName) -> tuple[Transformer, Gate | None]:
        """Returns a network, and its gate if it has one."""
        if name not in self._loaded:
            found = self.run.network(name).load(self.device)
            if isinstance(found, Spalm):
                found.set_neighbours(self.run.records(name).settings["neighbours"])
                self._loaded[name] = found.base, found.gate
            else:
                self._loaded[name] = found, None
        return self._loaded[name]

    def _combiner(self, row: Row, split: HeldOut, position: int) -> Combiner:
        """Returns the combiner of a row for a passage that begins at a position of a split."""
        _, gate = self._load(row.network)
        inner: Combiner = GateCombiner(gate) if gate is not None and row.gated else PlainCombiner()
        if row.mixture == "knn":
            return KnnCombiner(inner, Knn(**self.run.records(row.name).facts["knn"]))
        if row.mixture == "adaptive":
            file = mixture_file(self.run.records(row.name), split, position)
            return MixtureCombiner(inner, self._mixture(row.name, file))
        return inner

    def _load_mixture(self, row: RowName, file: str) -> AdaptiveMixture:
        return load_mixture(self.run.records(row), file).to(self.device)

    def _reading(self, name: RowName) -> Reading:
        """Returns the way of reading with which the records of a row were made."""
        settings, model = self.run.records(name).settings, self.run.network(ROWS[name].network).model_settings
        segment, stride = model.training.segment_length, settings["stride"]
        return Reading.of(
            model.network.layers,
            segment=segment,
            memory=settings["memory_length"],
            lanes=settings["lanes"],
            stride=stride,
        )
