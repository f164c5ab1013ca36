"""Pretrained causal language models: found by name, folder or GGUF file, used like our own."""

from spalm.lm.pretrained.folder import PretrainedFolder, locate_pretrained
from spalm.lm.pretrained.llama import LlamaModel
from spalm.lm.pretrained.model import PretrainedModel

__all__ = ["LlamaModel", "PretrainedFolder", "PretrainedModel", "locate_pretrained"]
