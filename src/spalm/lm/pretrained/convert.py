"""Conversion of GGUF files into the folder format of transformers."""

from pathlib import Path

import torch

from spalm import artifact
from spalm.errors import InputError, first_line
from spalm.lm.pretrained.import_transformers import import_transformers

_SOURCE = "converted.json"
"""File that names the GGUF file from which a folder was made; written last."""


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file to a folder with config.json, safetensors and tokenizer.json, unless that is done."""
    if not gguf.is_file():
        raise InputError(f"{gguf} does not exist; give the path of a GGUF file")
    done = folder / _SOURCE
    source = {"file": gguf.name, "sha256": artifact.digest_of_file(gguf)}
    if done.exists() and artifact.read_json(done) == source:
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
