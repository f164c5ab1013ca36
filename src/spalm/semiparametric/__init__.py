"""Hidden states and retrieved neighbours in, probabilities out: the gate and SPALM, kNN-LM, the adaptive mixture."""

from spalm.semiparametric.combiner import (
    CombinedPrediction,
    Combiner,
    GateCombiner,
    KnnCombiner,
    MixtureCombiner,
    PlainCombiner,
)
from spalm.semiparametric.copying import CopyTerm
from spalm.semiparametric.examples import BaseOutputs, TrainingExamples
from spalm.semiparametric.gate import ExtendedGateSettings, Gate, GateOutput, GateSettings
from spalm.semiparametric.knn import Knn, KnnSettings, tune_knn
from spalm.semiparametric.matched import Matched, Matcher
from spalm.semiparametric.mixture.adaptive import AdaptiveMixture, AdaptiveSettings, learn_mixture
from spalm.semiparametric.model import Spalm
from spalm.semiparametric.retrieval import Retrieved, Retriever, advance_neighbours
from spalm.semiparametric.scorer import Scorer, mean_loss, score_positions
from spalm.semiparametric.search import MemorySearch, Search, open_search
from spalm.semiparametric.training import SpalmModelSettings, SpalmSettings, TrainedSpalm, train_spalm

__all__ = [
    "AdaptiveMixture",
    "AdaptiveSettings",
    "BaseOutputs",
    "CombinedPrediction",
    "Combiner",
    "CopyTerm",
    "ExtendedGateSettings",
    "Gate",
    "GateCombiner",
    "GateOutput",
    "GateSettings",
    "Knn",
    "KnnCombiner",
    "KnnSettings",
    "Matched",
    "Matcher",
    "MixtureCombiner",
    "PlainCombiner",
    "Retrieved",
    "Retriever",
    "Scorer",
    "MemorySearch",
    "Search",
    "Spalm",
    "SpalmModelSettings",
    "SpalmSettings",
    "TrainedSpalm",
    "TrainingExamples",
    "advance_neighbours",
    "learn_mixture",
    "mean_loss",
    "open_search",
    "score_positions",
    "train_spalm",
    "tune_knn",
]
