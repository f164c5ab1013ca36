"""Conversion of GGUF files into the folder format of transformers."""

import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from spalm.console import say
from spalm.digests import KNOWN, SUMS, KnownDigests, digest_of_file, digest_of_text, write_sums
from spalm.errors import InputError, first_line
from spalm.files import (
    allow_as_umask_says,
    as_json,
    read_json,
    refuse_links_out_of,
    remove_leftovers,
    temporary_beside,
    write_atomically,
)
from spalm.lm.pretrained.import_transformers import import_transformers, open_pretrained
from spalm.manifest import Count, Digest

_SOURCE = "converted.json"
"""File that names the GGUF file from which a folder was made; written last."""
_IDENTITY = ("file", "sha256")
"""Fields of it that say which file it was; the others say where it lies."""


class _Source(BaseModel):
    """The form of that file."""

    file: str
    sha256: Digest
    path: str | None = None
    bytes: Count | None = None


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file to a folder with config.json, safetensors and tokenizer.json, unless that is done.

    The folder is made beside its place: nothing is written into one that somebody else may have made.
    """
    if not gguf.is_file():
        raise InputError(f"{gguf} does not exist; give the path of a GGUF file")
    if folder.is_symlink():
        raise InputError(f"{folder} is a symbolic link; remove it")
    if folder.exists():
        refuse_links_out_of(folder)
    place = {"path": str(gguf.resolve()), "bytes": gguf.stat().st_size}
    source = {"file": gguf.name, "sha256": digest_of_file(gguf), **place}
    known = _read(folder)
    if all(known.get(name) == source[name] for name in _IDENTITY):
        if known != source:  # it was moved, or an earlier version did not note where it lies
            _finish(folder, source)
        return
    if not known and folder.exists() and any(folder.iterdir()):
        raise InputError(
            f"{folder} holds files that were not made from a GGUF file; remove it, or choose another --out"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent, folder.name)
    half = temporary_beside(folder)
    half.mkdir()
    try:
        _convert(gguf, half)
        _finish(half, source)
        if folder.exists():
            shutil.rmtree(folder)  # of another GGUF file
        half.rename(folder)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the tokeniser and the model of a GGUF file to a folder in the format of transformers."""
    transformers = import_transformers()
    say(f"{gguf.name} is converted to float32, up to eight times its {gguf.stat().st_size / 1e6:,.0f} MB of disk")
    try:
        tokenizer = open_pretrained("AutoTokenizer", gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(folder)
        model = open_pretrained("AutoModelForCausalLM", gguf.parent, dtype=torch.float32, gguf_file=gguf.name)
    except ImportError:
        raise InputError("a GGUF file needs the extra: pip install 'spalm[pretrained]'") from None
    except Exception as error:  # a damaged file can raise anything
        raise InputError(f"{gguf} cannot be converted: {first_line(error)}") from None
    config = model.config.__class__.from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        auto = transformers.AutoModelForCausalLM
        plain = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    allow_as_umask_says(folder.glob("*.safetensors"))


def original_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file from which a folder was made, if there was one and it is still where it was.

    One that came with the folder is not opened: what reads it is not written for hostile files.
    """
    known = _read(folder)
    path = Path(known.get("path", ""))
    if not path.is_absolute() or path.resolve().is_relative_to(folder.parent.resolve()):
        return None
    if not path.is_file() or path.stat().st_size != known["bytes"]:
        return None
    if KnownDigests(folder / KNOWN).of(path) != known["sha256"]:
        raise InputError(f"{path} is not the file that {folder} was made from; put that back, or attach again")
    return path


def _finish(folder: Path, source: dict[str, Any]) -> None:
    """Writes the digests of all files of a folder, then the file that says what it was made from."""
    content = as_json(source)
    passing = (SUMS, KNOWN, _SOURCE)
    sums = {path.name: digest_of_file(path) for path in folder.iterdir() if path.name not in passing}
    write_sums(folder, {**sums, _SOURCE: digest_of_text(content)})
    write_atomically(folder / _SOURCE, content)


def _read(folder: Path) -> dict[str, Any]:
    """Returns what a folder was made from; nothing if it was not made from a GGUF file."""
    if not (folder / _SOURCE).exists():
        return {}
    found: _Source = read_json(folder / _SOURCE, _Source, remedy="attach the GGUF file again")
    return found.model_dump(exclude_none=True)
