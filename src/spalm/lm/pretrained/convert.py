"""Conversion of GGUF files into the folder format of transformers."""

from pathlib import Path

import torch

from spalm import artifact
from spalm.errors import InputError, first_line
from spalm.lm.pretrained.import_transformers import import_transformers

_SOURCE = "converted.json"
"""File that names the GGUF file from which a folder was made; written last."""
_IDENTITY = ("file", "sha256")
"""Fields of it that say which file it was; the others say where it lies."""


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file to a folder with config.json, safetensors and tokenizer.json, unless that is done."""
    if not gguf.is_file():
        raise InputError(f"{gguf} does not exist; give the path of a GGUF file")
    done = folder / _SOURCE
    place = {"path": str(gguf.resolve()), "bytes": gguf.stat().st_size}
    source = {"file": gguf.name, "sha256": artifact.digest_of_file(gguf), **place}
    known = artifact.read_json(done) if done.exists() else {}
    if all(known.get(name) == source[name] for name in _IDENTITY):
        if known != source:  # it was moved, or an earlier version did not note where it lies
            artifact.write_json(done, source)
        return
    transformers = import_transformers()
    folder.mkdir(parents=True, exist_ok=True)
    for old in (done, *folder.glob("*.safetensors*")):  # from another GGUF file, or half-written
        old.unlink(missing_ok=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(folder)
        auto = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(gguf.parent, dtype=torch.float32, gguf_file=gguf.name)
    except ImportError:
        raise InputError("a GGUF file needs the extra: pip install 'spalm[pretrained]'") from None
    except Exception as error:  # a damaged file can raise anything
        raise InputError(f"{gguf} cannot be converted: {first_line(error)}") from None
    config = model.config.__class__.from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        plain = auto.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    artifact.write_json(done, source)


def original_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file from which a folder was made, if there was one and it is still where it was."""
    done = folder / _SOURCE
    known = artifact.read_json(done) if done.exists() else {}
    path = Path(known["path"]) if "path" in known else None
    return path if path is not None and path.is_file() and path.stat().st_size == known["bytes"] else None
