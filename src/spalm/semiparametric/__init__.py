"""Tokens and neighbours in, SPALM out: gate, model, training; kNN-LM, the adaptive mixture; what models say, kept."""

from spalm.semiparametric.adaptive import (
    AdaptiveMixture,
    AdaptiveSettings,
    BaseOutputs,
    TrainingExamples,
    learn_mixture,
)
from spalm.semiparametric.combiner import Combined, Combiner, Plain, ThroughGate, WithKnn, WithMixture
from spalm.semiparametric.gate import Gate, GateSettings, Mixed
from spalm.semiparametric.knn import Knn, KnnSettings, tune_knn
from spalm.semiparametric.model import Spalm
from spalm.semiparametric.retrieval import Retrieved, Retriever, advance_neighbours, look_up
from spalm.semiparametric.scorer import Scorer, mean_loss, score_positions
from spalm.semiparametric.search import Search, open_search
from spalm.semiparametric.training import SpalmModelSettings, SpalmSettings, TrainedSpalm, train_spalm

__all__ = [
    "AdaptiveMixture",
    "AdaptiveSettings",
    "BaseOutputs",
    "Combined",
    "Combiner",
    "Gate",
    "GateSettings",
    "Knn",
    "KnnSettings",
    "Mixed",
    "Plain",
    "Retrieved",
    "Retriever",
    "Scorer",
    "Search",
    "Spalm",
    "SpalmModelSettings",
    "SpalmSettings",
    "ThroughGate",
    "TrainedSpalm",
    "TrainingExamples",
    "WithKnn",
    "WithMixture",
    "advance_neighbours",
    "learn_mixture",
    "look_up",
    "mean_loss",
    "open_search",
    "score_positions",
    "train_spalm",
    "tune_knn",
]
