"""A directory in, all models that it holds out: their networks, memory and index, each opened once."""

from spalm.generation.models.attached_models import AttachedModels
from spalm.generation.models.model_set import ModelSet, Neighbours, Network, Variant, no_neighbours
from spalm.generation.models.run_models import RunModels

__all__ = ["AttachedModels", "ModelSet", "Neighbours", "Network", "RunModels", "Variant", "no_neighbours"]
