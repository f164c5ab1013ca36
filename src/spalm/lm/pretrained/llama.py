"""A GGUF model run by llama.cpp, with the interface of every other model.

One pass over a batch gives the hidden state after the last norm *and* the logits of every position, so that the output
layer need not be computed again. The batch may hold pieces of several texts. Like every pretrained model it is checked
when it is opened: its logits must follow from its hidden states, and reading in pieces must change nothing.
"""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from spalm.errors import InputError
from spalm.lm.interface import Outputs

_BATCH = 512
"""Number of tokens that llama.cpp reads in one pass."""
_PROBE = 7
"""Number of tokens on which a model is checked."""
_TOLERANCE = 0.05
"""Root mean square difference of logits, as a share of their spread, that rounding of quantised weights explains."""


@dataclass(eq=False)
class SequenceState:
    """A text that is being read. Its keys and values are held by llama.cpp until the state is no longer used."""

    number: int
    """Number of the sequence in llama.cpp's cache."""
    tokens: int = 0
    """Number of tokens read so far."""


class LlamaModel:
    """A model of llama.cpp. It reads up to `sequences` texts at a time, each of up to `context_length` tokens."""

    def __init__(self, path: Path, *, threads: int, context: int | None = None, sequences: int = 1):
        """`context` is the longest text; by default, and at most, as long as the model can read."""
        self._api = _import_llama_cpp()
        self.path = path
        self._model = self._load(path)
        trained = self._api.llama_model_n_ctx_train(self._model)
        self.context_length: int | None = min(context or trained, trained)
        self.width: int = self._api.llama_model_n_embd(self._model)
        self.vocabulary: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._context = self._open_context(threads, sequences + 1)  # one for texts that are read without a state
        weakref.finalize(self, _free, self._api, self._model, self._context)
        self._cache = self._api.llama_get_memory(self._context)
        self._free = list(range(sequences, 0, -1))
        self._refuse_unless_exact()

    def _load(self, path: Path) -> Any:
        if not path.is_file():
            raise InputError(f"{path} does not exist; give the path of a GGUF file")
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        model = self._api.llama_model_load_from_file(str(path).encode(), settings)
        if not model:
            raise InputError(f"{path} cannot be opened by llama.cpp; give a GGUF file of a model that it knows")
        return model

    def _open_context(self, threads: int, sequences: int) -> Any:
        settings = self._api.llama_context_default_params()
        assert self.context_length is not None
        settings.n_ctx = self.context_length * sequences
        settings.n_batch = settings.n_ubatch = _BATCH
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        settings.embeddings = True
        settings.pooling_type = self._api.LLAMA_POOLING_TYPE_NONE
        context = self._api.llama_init_from_model(self._model, settings)
        if not context:
            raise InputError(f"{self.path}: llama.cpp has no room for {settings.n_ctx:,} tokens; give less context")
        return context

    @property
    def device(self) -> torch.device:
        """Device of the results."""
        return torch.device("cpu")

    def empty_state(self, memory_length: int = 0, longest_segment: int = 0) -> SequenceState:  # noqa: ARG002
        """Returns a state without tokens, whatever the lengths given; it takes one of the sequences."""
        if not self._free:
            raise InputError(f"{self.path}: all sequences are in use; wait until a text is finished")
        state = SequenceState(self._free.pop())
        weakref.finalize(state, self._release, state.number)
        return state

    def _release(self, number: int) -> None:
        self._api.llama_memory_seq_rm(self._cache, number, -1, -1)
        self._free.append(number)

    def shorten(self, state: SequenceState, tokens: int) -> None:
        """Forgets what a text has after its first `tokens` tokens."""
        self._api.llama_memory_seq_rm(self._cache, state.number, tokens, -1)
        state.tokens = tokens

    def copy_state(self, state: SequenceState) -> SequenceState:
        """Returns a state of its own for another text with the same beginning."""
        other = self.empty_state()
        self._api.llama_memory_seq_cp(self._cache, state.number, other.number, -1, -1)
        other.tokens = state.tokens
        return other

    def read(self, pieces: Sequence[tuple[SequenceState, Sequence[int]]]) -> list[Outputs]:
        """Reads further tokens of several texts; returns hidden states and logits after each of them."""
        tokens = np.concatenate([np.asarray(piece, np.int32) for _, piece in pieces])
        numbers = np.concatenate([np.full(len(piece), state.number, np.int32) for state, piece in pieces])
        places = np.concatenate([np.arange(len(piece), dtype=np.int32) + state.tokens for state, piece in pieces])
        if int(tokens.min(initial=0)) < 0 or int(tokens.max(initial=0)) >= self.vocabulary:
            raise InputError(f"{self.path}: token {int(tokens.max())} is not in its vocabulary of {self.vocabulary:,}")
        hidden, logits = torch.empty(len(tokens), self.width), torch.empty(len(tokens), self.vocabulary)
        for start in range(0, len(tokens), _BATCH):
            part = slice(start, start + _BATCH)
            hidden[part], logits[part] = self._decode(tokens[part], places[part], numbers[part])
        for state, piece in pieces:
            state.tokens += len(piece)
        sizes = [len(piece) for _, piece in pieces]
        return [Outputs(*both) for both in zip(hidden.split(sizes), logits.split(sizes), strict=True)]

    def _decode(
        self, tokens: Int[np.ndarray, "n"], places: Int[np.ndarray, "n"], numbers: Int[np.ndarray, "n"]
    ) -> tuple[Float[Tensor, "n width"], Float[Tensor, "n vocabulary"]]:
        """Runs one pass of llama.cpp."""
        count = len(tokens)
        tokens, places, numbers = (np.ascontiguousarray(each, np.int32) for each in (tokens, places, numbers))
        one_each, wanted = np.ones(count, np.int32), np.ones(count, np.int8)
        addresses = numbers.ctypes.data + 4 * np.arange(count, dtype=np.uint64)
        batch = self._api.llama_batch(n_tokens=count)
        for name, values in (
            ("token", tokens),
            ("pos", places),
            ("n_seq_id", one_each),
            ("seq_id", addresses),
            ("logits", wanted),
        ):
            kind = type(getattr(batch, name))
            setattr(batch, name, ctypes.cast(values.ctypes.data, kind))
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise InputError(f"{self.path}: llama.cpp could not read {count:,} tokens (code {code}); give less text")
        found = [self._api.llama_get_embeddings(self._context), self._api.llama_get_logits(self._context)]
        shapes = (count, self.width), (count, self.vocabulary)
        hidden, logits = (np.ctypeslib.as_array(one, shape) for one, shape in zip(found, shapes))
        return torch.from_numpy(hidden), torch.from_numpy(logits)

    @torch.inference_mode()
    def hidden(
        self, tokens: Int[Tensor, "batch time"], state: SequenceState | None = None
    ) -> Float[Tensor, "batch time width"]:
        """Returns h_t for every token; a state is taken into account and updated, for a batch of one text."""
        if state is not None:
            return self.read([(state, tokens[0].tolist())])[0].hidden[None]
        found = []
        for row in tokens.tolist():
            with self._whole_text() as whole:
                found.append(self.read([(whole, row)])[0].hidden)
        return torch.stack(found)

    @contextmanager
    def _whole_text(self) -> Iterator[SequenceState]:
        """Gives a state for a text that is read at once."""
        state = SequenceState(0)
        try:
            yield state
        finally:
            self._api.llama_memory_seq_rm(self._cache, 0, -1, -1)

    @cached_property
    def _table(self) -> Float[Tensor, "vocabulary width"]:
        """The vectors of the output layer, for what llama.cpp does not compute: a gate that changes hidden states."""
        import gguf

        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(self.path).tensors}
        table = tensors.get("output.weight") or tensors["token_embd.weight"]
        values = gguf.quants.dequantize(table.data, table.tensor_type)
        return torch.from_numpy(np.array(values, np.float32)).reshape(self.vocabulary, self.width)

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """Returns the tokens' vectors in the table of the output layer."""
        return F.embedding(tokens, self._table)

    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        """Returns log p of every token of the vocabulary."""
        return torch.log_softmax(hidden @ self._table.T, dim=-1)

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Returns log p of one token for each row."""
        parts = zip(hidden.split(_BATCH), targets.split(_BATCH))
        return torch.cat([-F.cross_entropy(rows @ self._table.T, wanted, reduction="none") for rows, wanted in parts])

    def _refuse_unless_exact(self) -> None:
        """Raises an error unless logits follow from hidden states, and reading in pieces changes nothing."""
        tokens = [token % self.vocabulary for token in range(1, 1 + _PROBE)]
        with self._whole_text() as whole:
            at_once = self.read([(whole, tokens)])[0]
        with self._whole_text() as whole:
            parts = [self.read([(whole, part)])[0] for part in (tokens[: _PROBE // 2], tokens[_PROBE // 2 :])]
        assert at_once.logits is not None
        logits = torch.cat([part.logits for part in parts if part.logits is not None])
        for found, problem in (
            (at_once.hidden @ self._table.T, "its logits do not follow from its last hidden state"),
            (logits, "it does not go on from keys and values of what it has read"),
        ):
            if (found - at_once.logits).square().mean().sqrt() > _TOLERANCE * at_once.logits.std():
                raise InputError(f"{self.path}: {problem}, so a memory cannot be mixed in; use --backend torch")


def _import_llama_cpp() -> Any:
    """Returns the module llama_cpp, silenced; tells how to install it where it is missing."""
    try:
        llama_cpp = import_module("llama_cpp")
    except ImportError:
        raise InputError("llama.cpp needs the extra: pip install 'spalm[llama]'") from None
    llama_cpp.llama_log_set(_drop_messages(), ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _drop_messages() -> Any:
    """Returns a callback that drops messages. It is kept, because llama.cpp calls it as long as the process runs."""
    return import_module("llama_cpp").llama_log_callback(lambda *_: None)


def _free(api: Any, model: Any, context: Any) -> None:
    api.llama_free(context)
    api.llama_model_free(model)
