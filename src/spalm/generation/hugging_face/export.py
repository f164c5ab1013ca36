"""The files by which transformers recognises a folder as a model, and a copy of such a folder that opens anywhere.

An attached model gets a config.json and the tokeniser files of its base model. A finished run gets its own files:

    RUN/config.json              model_type spalm, and which model of the run is used
    RUN/tokenizer.json           its tokeniser (corpus/to_tokenizers.py)
    RUN/tokenizer_config.json    the symbol for x_0, which also ends answers and pads batches
"""

import shutil
from pathlib import Path
from typing import Any

from spalm.artifact import MANIFEST, PREVIOUS, Artifact, only_writer
from spalm.attachment import ATTACHED_FILE, Attached
from spalm.attachment.attached import base_folder
from spalm.corpus.to_tokenizers import to_fast_tokenizer
from spalm.digests import KNOWN, sum_up, updating_sums
from spalm.errors import InputError
from spalm.files import (
    TEMPORARY,
    holds_stage,
    read_json,
    refuse_links_out_of,
    remove_leftovers,
    temporary_beside,
    write_atomically,
    write_json,
)
from spalm.runs import RESULTS, FinishedRun

CONFIG = "config.json"
_BASE = "model"
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
TOKENISER_FILES = ("tokenizer", "special_tokens", "chat_template", "generation_config", "vocab", "merges")
"""Beginnings of the names of a tokeniser's files."""
_KIND = {"model_type": "spalm", "architectures": ["SpalmForCausalLM"]}


def export_for_transformers(model: FinishedRun | Attached) -> None:
    """Writes the files by which transformers recognises a model into the model's folder."""
    if isinstance(model, Attached):
        _export_attached(model)
    else:
        _export_run(model)


def _export_attached(attached: Attached) -> None:
    """Writes config.json, and copies the base model's tokeniser files."""
    base, directory = attached.base.folder.path, attached.directory
    config = read_json(base / CONFIG, dict)
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    copied = [path for path in base.iterdir() if path.name.startswith(TOKENISER_FILES) and path.is_file()]
    with updating_sums(directory, [CONFIG, *(path.name for path in copied)]):
        write_json(directory / CONFIG, {**_KIND, "base": config, **ids})
        for path in copied:
            write_atomically(directory / path.name, path.read_bytes())


def _export_run(run: FinishedRun) -> None:
    """Writes config.json and the run's tokeniser in the form of transformers."""
    tokeniser, symbol = to_fast_tokenizer(run.corpus.tokeniser)
    id = tokeniser.token_to_id(symbol)
    config = {
        **_KIND,
        "model": run.default_row,
        "vocab_size": max(tokeniser.get_vocab_size(), run.corpus.vocabulary),
        **{f"{role}_token_id": id for role in ("bos", "eos", "pad")},
    }
    tokeniser_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        **{f"{role}_token": symbol for role in ("bos", "eos", "pad")},
    }
    with updating_sums(run.directory, ["tokenizer.json", "tokenizer_config.json", CONFIG]):
        write_atomically(run.directory / "tokenizer.json", tokeniser.to_str())
        write_json(run.directory / "tokenizer_config.json", tokeniser_config)
        write_json(run.directory / CONFIG, config)


def copy_model(source: Path, target: Path, changes: dict[str, Any]) -> None:
    """Copies all of `source` to `target`, including the base model, with some changes to config.json.

    The copy is made beside the target and then moved there part by part, so that it is not mixed with older files.
    """
    whole, wanted = source.resolve(), target.resolve()
    if whole.is_relative_to(wanted) or wanted.is_relative_to(whole):
        raise InputError(f"{target}: the model itself is at {source}; give a folder that is apart from it")
    there, here = (folder / "corpus" for folder in (wanted, whole))
    if wanted.is_file() or ((there / MANIFEST).exists() and Artifact(there).digest != Artifact(here).digest):
        raise InputError(f"{target} is a file, or holds another model; give another folder")
    refuse_links_out_of(whole, but_for=holds_stage)  # the copy has what they lead to
    remove_leftovers(wanted.parent, wanted.name)
    half = temporary_beside(wanted)
    with only_writer(whole / "memory"):  # the memory must not change while it is copied
        shutil.copytree(whole, half, ignore=shutil.ignore_patterns(f"*{TEMPORARY}", f"*{PREVIOUS}*", KNOWN))
    attached = (half / ATTACHED_FILE).is_file()
    if attached:
        _include_base(whole, half)
    with updating_sums(half, [CONFIG]):
        write_json(half / CONFIG, {**read_json(half / CONFIG, dict), **changes})
    _move(half, wanted, ATTACHED_FILE if attached else RESULTS)


def _include_base(source: Path, copy: Path) -> None:
    """Puts the base model into a copy of an attached model, and records its place there."""
    description = read_json(source / ATTACHED_FILE, dict[str, Any])
    base, place = base_folder(source, str(description.get("model"))).resolve(), _BASE
    if base.is_relative_to(source):  # was converted there, so it has been copied
        place = str(base.relative_to(source))
    else:
        shutil.rmtree(copy / place, ignore_errors=True)  # of an earlier attachment
        (copy / place).mkdir()
        files = [path for pattern in _MODEL_FILES for path in base.glob(pattern) if path.is_file()]
        for path in files:
            shutil.copyfile(path, copy / place / path.name)
        sum_up(copy / place, [path.name for path in files])
    with updating_sums(copy, [ATTACHED_FILE]):
        write_json(copy / ATTACHED_FILE, {**description, "model": place})


def _move(half: Path, target: Path, mark: str) -> None:
    """Moves a copy to its place. The file `mark`, which makes a folder a model, is deleted first and moved last."""
    target.mkdir(parents=True, exist_ok=True)
    (target / mark).unlink(missing_ok=True)
    for path in sorted(half.iterdir(), key=lambda path: path.name == mark):
        old = target / path.name
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        path.rename(old)
    half.rmdir()
