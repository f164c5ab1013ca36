"""Tokens and neighbours in, SPALM out: gate, model, training; kNN-LM, the adaptive mixture; what models say, kept."""

from spalm.semiparametric.adaptive import AdaptiveMixture, AdaptiveSettings, Lesson, Said, learn_mixture
from spalm.semiparametric.attached import Attached, AttachSettings, is_attached
from spalm.semiparametric.attaching import attach
from spalm.semiparametric.combiner import Combined, Combiner, Plain, ThroughGate, WithKnn, WithMixture
from spalm.semiparametric.finished import RECIPE, RESULTS, FinishedRun
from spalm.semiparametric.gate import Gate, GateSettings, Mixed
from spalm.semiparametric.knn import Knn, KnnSettings, tune_knn
from spalm.semiparametric.mixtures import load_mixture, mix_adaptively, mix_knn
from spalm.semiparametric.model import Spalm
from spalm.semiparametric.policy import PolicySettings, SearchPolicy
from spalm.semiparametric.records import HELD_OUT, HeldOut, Records, Scorer, keep_records
from spalm.semiparametric.retrieval import Retrieved, Retriever, look_up, moved_on
from spalm.semiparametric.scoring import remember_files, score_files
from spalm.semiparametric.searching import Search, open_search
from spalm.semiparametric.training import SpalmModelSettings, SpalmSettings, TrainedSpalm, train_spalm

__all__ = [
    "HELD_OUT",
    "RECIPE",
    "RESULTS",
    "AdaptiveMixture",
    "AdaptiveSettings",
    "AttachSettings",
    "Attached",
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
    "PolicySettings",
    "Records",
    "Retrieved",
    "Retriever",
    "Said",
    "Scorer",
    "Search",
    "SearchPolicy",
    "Spalm",
    "SpalmModelSettings",
    "SpalmSettings",
    "ThroughGate",
    "TrainedSpalm",
    "WithKnn",
    "WithMixture",
    "attach",
    "is_attached",
    "keep_records",
    "learn_mixture",
    "load_mixture",
    "look_up",
    "mix_adaptively",
    "mix_knn",
    "moved_on",
    "open_search",
    "remember_files",
    "score_files",
    "train_spalm",
    "tune_knn",
]
