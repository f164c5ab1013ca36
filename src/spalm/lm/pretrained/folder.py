"""Pretrained models on disk: a folder with config.json, safetensors and tokenizer.json, and how it is found."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from spalm.artifact import digest_of_file, digest_of_json
from spalm.errors import InputError, first_line
from spalm.lm.pretrained.convert import convert_gguf, original_gguf
from spalm.lm.pretrained.import_transformers import import_transformers
from spalm.lm.pretrained.model import PretrainedModel
from spalm.paths import user_path

_DIGESTED = ("*.safetensors", "config.json", "tokenizer.json")
"""Patterns of the files on which hidden states depend."""


@dataclass(frozen=True)
class PretrainedFolder:
    """The folder of a pretrained model."""

    path: Path
    """Path of the folder."""

    @property
    def digest(self) -> str:
        """Digest of everything on which the model's hidden states depend."""
        files = sorted(path for pattern in _DIGESTED for path in self.path.glob(pattern))
        return digest_of_json([(path.name, digest_of_file(path)) for path in files])

    @property
    def gguf(self) -> Path | None:
        """The GGUF file from which the folder was made, if there was one and it is still there."""
        return original_gguf(self.path)

    def load(self, device: torch.device) -> PretrainedModel:
        """Loads the model: in single precision on a CPU, as it was saved on other devices."""
        auto = import_transformers().AutoModelForCausalLM
        dtype = torch.float32 if device.type == "cpu" else "auto"
        try:
            model, report = auto.from_pretrained(self.path, dtype=dtype, output_loading_info=True)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"{self.path} is no causal language model: {first_line(error)}") from None
        except RuntimeError:  # its message is a report of many lines
            raise InputError(f"{self.path}: the weights are not as config.json says; save it anew") from None
        if missing := sorted(report["missing_keys"]):
            raise InputError(f"{self.path}: no weights of {missing[0]} and {len(missing) - 1} more; save it anew")
        return PretrainedModel(model.to(device), str(self.path))


def locate_pretrained(name: str, converted: Path) -> PretrainedFolder:
    """Finds a model by the path of its folder, of a GGUF file, or by its name on the Hugging Face hub.

    A GGUF file is converted once, into the folder `converted`.
    """
    path = user_path(name)
    if path.suffix == ".gguf":
        convert_gguf(path, converted)
        return PretrainedFolder(converted)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"{path} holds no model (no config.json); give the folder of one, a GGUF file or a hub name"
            )
        return _complete(path)
    if path.exists():
        raise InputError(f"{path} is no folder of a model, nor a .gguf file")
    return _complete(_download(name))


def _download(name: str) -> Path:
    """Downloads a model from the hub, unless it is in the cache, and returns its local folder."""
    transformers = import_transformers()
    try:
        config = transformers.utils.cached_file(name, "config.json")
        transformers.AutoTokenizer.from_pretrained(name)  # fetches its files
        transformers.AutoModelForCausalLM.from_pretrained(name, device_map="meta")  # and the weights
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"there is no model {name!r}, neither here nor on the hub ({first_line(error)})") from None
    return Path(config).parent


def _complete(path: Path) -> PretrainedFolder:
    """Returns the folder at `path`; raises an error if it lacks a tokeniser or weights that can be read."""
    if not (path / "tokenizer.json").is_file():
        raise InputError(f"{path} has no tokenizer.json; save its tokeniser there in the fast format")
    if not any(path.glob("*.safetensors")):
        raise InputError(f"{path} has no weights as safetensors; save the model there with `save_pretrained`")
    return PretrainedFolder(path)
