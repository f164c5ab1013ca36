"""Tokens in, a language model out: transformer-XL and its training, pretrained models, and how a model reads text."""

from spalm.lm.flops import count_flops
from spalm.lm.incremental import IncrementalReader
from spalm.lm.interface import BatchReader, LanguageModel, Outputs
from spalm.lm.reading import Reading, hidden_states, log_probabilities
from spalm.lm.state import State, next_memory
from spalm.lm.training import ModelSettings, TrainedModel, parameter_count, segment_loss, train_model
from spalm.lm.transformer import NetworkSettings, Transformer
from spalm.lm.vocabulary import AdaptiveVocabulary, Vocabulary

__all__ = [
    "AdaptiveVocabulary",
    "BatchReader",
    "IncrementalReader",
    "LanguageModel",
    "ModelSettings",
    "NetworkSettings",
    "Outputs",
    "Reading",
    "State",
    "TrainedModel",
    "Transformer",
    "Vocabulary",
    "count_flops",
    "hidden_states",
    "log_probabilities",
    "next_memory",
    "parameter_count",
    "segment_loss",
    "train_model",
]
