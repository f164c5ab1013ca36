"""A model with its memory in, a model for transformers out; and the files by which transformers recognises a folder."""

from spalm.generation.hugging_face.export import CONFIG, copy_model, export_for_transformers

__all__ = ["CONFIG", "copy_model", "export_for_transformers"]
