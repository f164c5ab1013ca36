"""Pretrained models on disk: a folder with config.json, safetensors and tokenizer.json, and how it is found."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel
from safetensors import SafetensorError

from spalm.digests import digest_of_file, digest_of_json
from spalm.errors import InputError, first_line
from spalm.files import read_json
from spalm.lm.pretrained.batched import read_together_if_possible
from spalm.lm.pretrained.convert import convert_gguf, original_gguf
from spalm.lm.pretrained.import_transformers import import_transformers, open_pretrained
from spalm.lm.pretrained.model import PretrainedModel
from spalm.manifest import PlainName
from spalm.paths import user_path

_DIGESTED = ("*.safetensors", "config.json", "tokenizer.json")
"""Patterns of the files on which hidden states depend."""
_WEIGHT_INDEX = "model.safetensors.index.json"
"""File that says in which file each tensor is, where there are several."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
"""Name of a folder of the hub's cache that holds one commit of a repository."""


class _WeightIndex(BaseModel):
    """The form of that file."""

    weight_map: dict[str, PlainName]


@dataclass(frozen=True)
class PretrainedFolder:
    """The folder of a pretrained model."""

    path: Path
    """Path of the folder."""
    revision: str | None = None
    """Commit of the repository on the hub from which it was fetched, if it was."""

    def digest(self, digest_of: Callable[[Path], str] = digest_of_file) -> str:
        """Returns the digest of everything on which the model's hidden states depend.

        `digest_of` returns the digest of a file; with `KnownDigests.of`, files are only read if they changed.
        """
        return self.digests(digest_of)[0]

    def digests(self, digest_of: Callable[[Path], str] = digest_of_file) -> list[str]:
        """Returns `digest` and, where it differs, what it was in versions that left out the list of weights."""
        known = {path.name: digest_of(path) for pattern in _DIGESTED for path in self.path.glob(pattern)}
        earlier = digest_of_json(sorted(known.items()))
        if not (self.path / _WEIGHT_INDEX).is_file():
            return [earlier]
        whole = {**known, _WEIGHT_INDEX: digest_of(self.path / _WEIGHT_INDEX)}
        return [digest_of_json(sorted(whole.items())), earlier]

    @property
    def gguf(self) -> Path | None:
        """The GGUF file from which the folder was made, if there was one and it is still there."""
        return original_gguf(self.path)

    @property
    def size(self) -> int:
        """Bytes of the weights on disk."""
        return sum(path.stat().st_size for path in self.path.glob("*.safetensors"))

    def load(self, device: torch.device, precision: Literal["float32", "bfloat16"] | None = None) -> PretrainedModel:
        """Loads the model; by default in single precision on a CPU, as it was saved on other devices.

        A model in bfloat16 is checked in single precision: what is checked holds only up to rounding.
        """
        import_transformers()
        self._refuse_foreign_code()
        dtype = "auto" if precision is None and device.type != "cpu" else torch.float32
        try:
            model, report = open_pretrained("AutoModelForCausalLM", self.path, dtype=dtype, output_loading_info=True)
        except MemoryError:
            raise
        except RuntimeError:  # its message is a report of many lines
            raise InputError(f"{self.path}: the weights are not as config.json says; save it anew") from None
        except Exception as error:  # a damaged config.json can raise anything
            raise InputError(f"{self.path} is no causal language model: {first_line(error)}") from None
        if missing := sorted(report["missing_keys"]):
            raise InputError(f"{self.path}: no weights of {missing[0]} and {len(missing) - 1} more; save it anew")
        loaded = read_together_if_possible(PretrainedModel(model.to(device), str(self.path)))
        return loaded.to_bfloat16() if precision == "bfloat16" else loaded

    def _refuse_foreign_code(self) -> None:
        """Refuses a model that would have other repositories fetched, code of theirs run, or files elsewhere read."""
        config = read_json(self.path / "config.json", dict, remedy="save the model anew")
        attention = config.get("attn_implementation", config.get("_attn_implementation"))
        if isinstance(attention, str) and "/" in attention:
            raise InputError(f"{self.path}: config.json asks for the code {attention!r}, which is not run; remove that")
        if (self.path / _WEIGHT_INDEX).exists():
            read_json(self.path / _WEIGHT_INDEX, _WeightIndex, remedy="save the model anew")
        if (self.path / "adapter_config.json").exists():
            raise InputError(f"{self.path} holds an adapter of another model; merge the two, and give the result")


def locate_pretrained(name: str, converted: Path, revision: str | None = None) -> PretrainedFolder:
    """Finds a model by the path of its folder, of a GGUF file, or by its name on the Hugging Face hub.

    A GGUF file is converted once, into the folder `converted`. `revision` is the commit, tag or branch that is wanted
    of a repository on the hub; it may also follow the name, as in NAME@REVISION.
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
    name, _, wanted = name.partition("@")
    return _complete(*_download(name, wanted or revision))


def _download(name: str, revision: str | None) -> tuple[Path, str | None]:
    """Downloads a model from the hub, unless it is in the cache, and returns its local folder and its commit."""
    transformers = import_transformers()
    try:
        folder = Path(transformers.utils.cached_file(name, "config.json", revision=revision)).parent
        commit = folder.name if _COMMIT.fullmatch(folder.name) else None
        exactly = commit or revision or "main"
        open_pretrained("AutoTokenizer", name, revision=exactly)  # fetches its files
        open_pretrained("AutoModelForCausalLM", name, revision=exactly, device_map="meta")  # and the weights
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"there is no model {name!r}, neither here nor on the hub ({first_line(error)})") from None
    return folder, commit


def _complete(path: Path, revision: str | None = None) -> PretrainedFolder:
    """Returns the folder at `path`; raises an error if it lacks a tokeniser or weights that can be read."""
    if not (path / "tokenizer.json").is_file():
        raise InputError(f"{path} has no tokenizer.json; save its tokeniser there in the fast format")
    if not any(path.glob("*.safetensors")):
        raise InputError(f"{path} has no weights as safetensors; save the model there with `save_pretrained`")
    return PretrainedFolder(path, revision)
