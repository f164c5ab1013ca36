"""Any causal LM of Hugging Face behind the interface of our own: frozen, its last hidden state is what the head sees.

Between h_t and the probabilities is where a memory comes in, so the way from one to the other must be known exactly. It
is the output layer, for some architectures followed by a scale or a soft cap that their configuration names. That it is
so, and that the model reads from left to right, at once or in pieces, is checked on each model when it is opened; one
for which it is not is refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor

from spalm import artifact
from spalm.errors import InputError, first_line

_ROWS = 256
"""Positions whose logits are held at a time."""
_PROBE = 7
"""Tokens on which a model is checked."""
_WEIGHTS = ("*.safetensors", "config.json", "tokenizer.json")


@dataclass
class Carried:
    """The keys and values of what was read so far."""

    cache: Any


class Pretrained:
    """A loaded model. What differs from our own networks: its state grows with the text, up to its last position."""

    def __init__(self, model: Any, name: str):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.longest: int | None = getattr(self.config, "max_position_embeddings", None)
        """Tokens that it can read at once; None: any number."""
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise InputError(f"{name} ({type(model).__name__}) has no output layer; give a causal language model")
        self.vocabulary, self.width = self._head.weight.shape
        self._refuse_unless_exact(name)

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    def start(self, memory_length: int = 0, longest_segment: int = 0) -> Carried:  # noqa: ARG002
        from transformers import DynamicCache

        return Carried(DynamicCache(config=self.config))

    @torch.inference_mode()
    def hidden(
        self, tokens: Int[Tensor, "batch time"], state: Carried | None = None
    ) -> Float[Tensor, "batch time width"]:
        cache = None if state is None else state.cache
        read = self.model.base_model(input_ids=tokens, past_key_values=cache, use_cache=cache is not None)
        if state is not None:
            state.cache = getattr(read, "past_key_values", None)
        return read.last_hidden_state

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        return F.embedding(tokens, self._head.weight).float()

    def logits(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        """As the model itself gives them, in single precision."""
        logits = self._head(hidden.to(self._head.weight.dtype)).float()
        logits = logits * (getattr(self.config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(self.config, "logits_scaling", None) or 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        return torch.log_softmax(self.logits(hidden), dim=-1)

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        parts = zip(hidden.split(_ROWS), targets.split(_ROWS))
        return torch.cat([-F.cross_entropy(self.logits(rows), wanted, reduction="none") for rows, wanted in parts])

    @torch.inference_mode()
    def _refuse_unless_exact(self, name: str) -> None:
        tokens = torch.arange(1, 1 + _PROBE, device=self.device)[None] % self.vocabulary
        half = _PROBE // 2
        hidden = self.hidden(tokens)
        if not _alike(self.hidden(tokens[:, :half]), hidden[:, :half]):
            raise InputError(
                f"{name} ({type(self.model).__name__}) looks ahead: what it says of a token depends on those after it; "
                "give a causal language model"
            )
        if not _alike(self.model(input_ids=tokens).logits.float(), self.logits(hidden)):
            raise InputError(
                f"{name}: the logits of {type(self.model).__name__} do not follow from its last hidden state in a way "
                "that is known here, so a memory cannot be mixed in exactly; give another model"
            )
        state = self.start()
        pieces = [self.hidden(part, state) for part in (tokens[:, :half], tokens[:, half:])]
        if not _alike(torch.cat(pieces, 1), hidden):
            raise InputError(
                f"{name}: {type(self.model).__name__} does not go on from keys and values of what it has read; give a "
                "model with attention"
            )


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Up to rounding."""
    close = {"rtol": 1e-3, "atol": 1e-3 * float(expected.std()) + 1e-6}
    return found.shape == expected.shape and torch.allclose(found, expected, **close)


@dataclass(frozen=True)
class PretrainedFolder:
    """A model on disk: a folder with config.json, safetensors and tokenizer.json."""

    path: Path

    @property
    def digest(self) -> str:
        """Of everything that its hidden states depend on."""
        files = sorted(path for pattern in _WEIGHTS for path in self.path.glob(pattern))
        return artifact.digest_of_json([(path.name, artifact.digest_of_file(path)) for path in files])

    def load(self, device: torch.device) -> Pretrained:
        auto = _transformers().AutoModelForCausalLM
        dtype = torch.float32 if device.type == "cpu" else "auto"
        try:
            model, report = auto.from_pretrained(self.path, dtype=dtype, output_loading_info=True)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"{self.path} is no causal language model: {first_line(error)}") from None
        except RuntimeError:  # its message is a report of many lines
            raise InputError(f"{self.path}: the weights are not as config.json says; save it anew") from None
        if missing := sorted(report["missing_keys"]):
            raise InputError(f"{self.path}: no weights of {missing[0]} and {len(missing) - 1} more; save it anew")
        return Pretrained(model.to(device), str(self.path))


def locate_pretrained(name: str, converted: Path) -> PretrainedFolder:
    """A model by the path of its folder, of a GGUF file, or by its name on the hub.

    A GGUF file is converted once, to `converted`.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return _converted(path, converted)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"{path} holds no model (no config.json); give the folder of one, a GGUF file or a hub name"
            )
        return _whole(path)
    if path.exists():
        raise InputError(f"{path} is no folder of a model, nor a .gguf file")
    transformers = _transformers()
    try:
        config = transformers.utils.cached_file(name, "config.json")
        transformers.AutoTokenizer.from_pretrained(name)  # fetches its files
        transformers.AutoModelForCausalLM.from_pretrained(name, device_map="meta")  # and the weights
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"there is no model {name!r}, neither here nor on the hub ({first_line(error)})") from None
    return _whole(Path(config).parent)


def _converted(gguf: Path, folder: Path) -> PretrainedFolder:
    if not gguf.is_file():
        raise InputError(f"{gguf} does not exist; give the path of a GGUF file")
    done = folder / "converted.json"
    source = {"file": gguf.name, "sha256": artifact.digest_of_file(gguf)}
    if done.exists() and artifact.read_json(done) == source:
        return PretrainedFolder(folder)
    transformers = _transformers()
    folder.mkdir(parents=True, exist_ok=True)
    for old in (done, *folder.glob("*.safetensors*")):  # of another file, or half-made
        old.unlink(missing_ok=True)
    try:
        about = {"gguf_file": gguf.name}
        transformers.AutoTokenizer.from_pretrained(gguf.parent, **about).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **about)
    except ImportError:
        raise InputError("a GGUF file needs the extra: pip install 'spalm[pretrained]'") from None
    except Exception as error:  # of a damaged file, anything
        raise InputError(f"{gguf} cannot be converted: {first_line(error)}") from None
    config = model.config.__class__.from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole.load_state_dict(model.state_dict(), assign=True)
    whole.tie_weights()
    whole.save_pretrained(folder)
    artifact.write_json(done, source)
    return PretrainedFolder(folder)


def _whole(path: Path) -> PretrainedFolder:
    if not (path / "tokenizer.json").is_file():
        raise InputError(f"{path} has no tokenizer.json; save its tokeniser there in the fast format")
    if not any(path.glob("*.safetensors")):
        raise InputError(f"{path} has no weights as safetensors; save the model there with `save_pretrained`")
    return PretrainedFolder(path)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError("pretrained models need the extra: pip install 'spalm[pretrained]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
