"""Pretrained causal language models: found by name, folder or GGUF file, used like our own."""

from spalm.lm.pretrained.backend import Backend, lanes_of, open_with, usable_backends, usable_for
from spalm.lm.pretrained.folder import PretrainedFolder, locate_pretrained
from spalm.lm.pretrained.llama import LlamaModel
from spalm.lm.pretrained.model import PretrainedModel

__all__ = [
    "Backend",
    "LlamaModel",
    "PretrainedFolder",
    "PretrainedModel",
    "lanes_of",
    "locate_pretrained",
    "open_with",
    "usable_backends",
    "usable_for",
]
