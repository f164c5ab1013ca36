"""A model with its memory in, a model of transformers out; and the files by which transformers knows a folder."""

from spalm.generation.hugging_face.export import CONFIG, copy_model, export_for_transformers

__all__ = ["CONFIG", "copy_model", "export_for_transformers"]
