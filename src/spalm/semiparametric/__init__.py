"""Tokens and neighbours in, SPALM out: gate, model, training; kNN-LM, the adaptive mixture; what models say, kept."""

from spalm.semiparametric.adaptive import AdaptiveMixture, AdaptiveSettings, Lesson, Said, learn_mixture
from spalm.semiparametric.combiner import Combined, Combiner, Plain, ThroughGate, WithKnn, WithMixture
from spalm.semiparametric.finished import RECIPE, RESULTS, FinishedRun
from spalm.semiparametric.gate import Gate, GateSettings, Mixed
from spalm.semiparametric.knn import Knn, KnnSettings, tune_knn
from spalm.semiparametric.mixtures import load_mixture, mix_adaptively, mix_knn
from spalm.semiparametric.model import Spalm
from spalm.semiparametric.records import HELD_OUT, HeldOut, Records, Scorer, keep_records
from spalm.semiparametric.retrieval import Retrieved, Retriever, look_up
from spalm.semiparametric.training import SpalmModelSettings, SpalmSettings, TrainedSpalm, train_spalm

__all__ = [
    "HELD_OUT",
    "RECIPE",
    "RESULTS",
    "AdaptiveMixture",
    "AdaptiveSettings",
    "Combined",
    "Combiner",
    "FinishedRun",
    "Gate",
    "GateSettings",
    "HeldOut",
    "Knn",
    "KnnSettings",
    "Lesson",
    "Mixed",
    "Plain",
    "Records",
    "Retrieved",
    "Retriever",
    "Said",
    "Scorer",
    "Spalm",
    "SpalmModelSettings",
    "SpalmSettings",
    "ThroughGate",
    "TrainedSpalm",
    "WithKnn",
    "WithMixture",
    "keep_records",
    "learn_mixture",
    "load_mixture",
    "look_up",
    "mix_adaptively",
    "mix_knn",
    "train_spalm",
    "tune_knn",
]
