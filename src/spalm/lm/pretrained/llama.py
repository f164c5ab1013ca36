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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spalm.errors import InputError
from spalm.lm.interface import Outputs
from spalm.lm.pretrained.sequences import SequenceNumbers, SequenceState

_BATCH = 512
"""Number of tokens that llama.cpp reads in one pass."""
_SILENT = 8
"""Number of positions without outputs from which on they are read in a pass of their own."""
_PROBE, _HALF = 7, 3
"""Number of tokens on which a model is checked, and of those that are read first where they are read in pieces."""
_TOLERANCE = 0.05
"""Root mean square difference of logits, as a share of their spread, that rounding of quantised weights explains."""


@dataclass(frozen=True)
class _Batch:
    """Tokens that are read in one pass: their ids, their places in their texts, and the numbers of their sequences."""

    tokens: Int[np.ndarray, "n"]
    places: Int[np.ndarray, "n"]
    numbers: Int[np.ndarray, "n"]

    @classmethod
    def of(cls, pieces: Sequence[tuple[SequenceState, Sequence[int]]]) -> "_Batch":
        """Returns the pieces of several texts as one batch."""
        tokens, places, numbers = [], [], []
        for state, piece in pieces:
            tokens += piece
            places += range(state.tokens, state.tokens + len(piece))
            numbers += [state.number] * len(piece)
        return cls(*np.array([tokens, places, numbers], np.int32))

    def __getitem__(self, rows: Any) -> "_Batch":
        chosen = (np.ascontiguousarray(each[rows]) for each in (self.tokens, self.places, self.numbers))
        return _Batch(*chosen)


class _Buffers:
    """The arrays from which llama.cpp reads a batch; they are made once, because making them takes long."""

    def __init__(self, api: Any):
        self._tokens, self._places, self._numbers = np.zeros((3, _BATCH), np.int32)
        self._one_each, self._wanted = np.ones(_BATCH, np.int32), np.zeros(_BATCH, np.int8)
        self._addresses = self._numbers.ctypes.data + 4 * np.arange(_BATCH, dtype=np.uint64)
        self._batch = api.llama_batch(n_tokens=0)
        for name, values in (
            ("token", self._tokens),
            ("pos", self._places),
            ("n_seq_id", self._one_each),
            ("seq_id", self._addresses),
            ("logits", self._wanted),
        ):
            kind = type(getattr(self._batch, name))
            setattr(self._batch, name, ctypes.cast(values.ctypes.data, kind))

    def filled(self, part: _Batch, *, outputs: bool) -> Any:
        """Returns a batch in llama.cpp's form; `outputs`: hidden states and logits are wanted."""
        count = self._batch.n_tokens = len(part.tokens)
        self._tokens[:count], self._places[:count], self._numbers[:count] = part.tokens, part.places, part.numbers
        self._wanted[:count] = outputs
        return self._batch


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
        self._threads = threads
        self._buffers = _Buffers(self._api)
        self._opened: list[Any] = []  # contexts of llama.cpp
        weakref.finalize(self, _free, self._api, self._model, self._opened)
        self.reserve(sequences)
        self._refuse_unless_exact()
        self.can_shorten = self._shortens_exactly()
        """Whether the last tokens of a text can be taken back; not those of a recurrent model."""

    def reserve(self, texts: int) -> None:
        """Makes room for this many texts at a time; none may be in progress."""
        while self._opened:
            self._api.llama_free(self._opened.pop())
        self._context = self._open_context(self._threads, texts + 1)  # one for texts that are read without a state
        self._opened.append(self._context)
        self._cache = self._api.llama_get_memory(self._context)
        self._sequences = SequenceNumbers(1, texts)

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
        settings.swa_full = True  # layers that see a window keep all tokens, so that texts can be shortened
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
        state = self._sequences.begin()
        if state is None:
            raise InputError(f"{self.path}: all sequences are in use; wait until a text is finished")
        self._api.llama_memory_seq_rm(self._cache, state.number, -1, -1)
        return state

    def shorten(self, state: SequenceState, tokens: int) -> None:
        """Forgets what a text has after its first `tokens` tokens."""
        if not self._api.llama_memory_seq_rm(self._cache, state.number, tokens, -1):
            raise RuntimeError(f"{self.path}: llama.cpp cannot take back the last tokens of a text of this model")
        state.tokens = tokens

    def copy_state(self, state: SequenceState) -> SequenceState:
        """Returns a state of its own for another text with the same beginning."""
        other = self.empty_state()
        self._api.llama_memory_seq_cp(self._cache, state.number, other.number, -1, -1)
        other.tokens = state.tokens
        return other

    def read(
        self, pieces: Sequence[tuple[SequenceState, Sequence[int]]], needed: Sequence[int] | None = None
    ) -> list[Outputs]:
        """Reads further tokens of several texts; returns hidden states and logits of the last positions of each.

        `needed` is the number of these positions; None: all. Others cost less: llama.cpp leaves out the output layer.
        """
        # In the order of their numbers: llama.cpp divides a pass wherever these do not follow one another.
        order = sorted(range(len(pieces)), key=lambda index: pieces[index][0].number)
        counts = [len(piece) for _, piece in pieces] if needed is None else list(needed)
        found = self._read_in_order([pieces[index] for index in order], [counts[index] for index in order])
        by_piece = dict(zip(order, found))
        return [by_piece[index] for index in range(len(pieces))]

    def _read_in_order(
        self, pieces: Sequence[tuple[SequenceState, Sequence[int]]], counts: Sequence[int]
    ) -> list[Outputs]:
        """Reads further tokens of texts whose numbers rise; returns the outputs of the last `counts` positions."""
        batch = _Batch.of(pieces)
        if int(batch.tokens.min(initial=0)) < 0 or int(batch.tokens.max(initial=0)) >= self.vocabulary:
            highest = int(batch.tokens.max())
            raise InputError(f"{self.path}: token {highest} is not in its vocabulary of {self.vocabulary:,}")
        wanted = _last_of_each([len(piece) for _, piece in pieces], counts)
        if len(wanted) - sum(counts) >= _SILENT:
            silent, batch, wanted = batch[~wanted], batch[wanted], wanted[wanted]
            for start in range(0, len(silent.tokens), _BATCH):
                self._decode(silent[start : start + _BATCH], outputs=False)
        found = []
        for start in range(0, len(batch.tokens), _BATCH):
            part = slice(start, start + _BATCH)
            self._decode(batch[part], outputs=True)
            found.append(self._outputs(len(batch[part].tokens), wanted[part]))
        for state, piece in pieces:
            state.tokens += len(piece)
        together = Outputs.concatenate(found) if found else Outputs(torch.empty(0, self.width))
        ends = np.cumsum(counts)
        return [together[slice(end - count, end)] for end, count in zip(ends.tolist(), counts)]

    def _outputs(self, count: int, wanted: Bool[np.ndarray, "n"]) -> Outputs:
        """Returns copies of what the last pass computed for `count` positions, of those that are wanted."""
        found = [self._api.llama_get_embeddings(self._context), self._api.llama_get_logits(self._context)]
        hidden, logits = torch.empty(count, self.width), torch.empty(count, self.vocabulary)
        for address, copy in zip(found, (hidden, logits)):
            ctypes.memmove(copy.data_ptr(), address, 4 * copy.numel())
        return Outputs(hidden, logits) if wanted.all() else Outputs(hidden[wanted], logits[wanted])

    def _decode(self, part: "_Batch", *, outputs: bool) -> None:
        """Runs one pass of llama.cpp; `outputs`: hidden states and logits are computed."""
        self._api.llama_set_embeddings(self._context, outputs)
        code = self._api.llama_decode(self._context, self._buffers.filled(part, outputs=outputs))
        if code:
            count = len(part.tokens)
            raise InputError(f"{self.path}: llama.cpp could not read {count:,} tokens (code {code}); give less text")

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
        hidden, logits = self._read_probe()
        with self._whole_text() as whole:
            parts = [self.read([(whole, part)])[0] for part in (self._probe[:_HALF], self._probe[_HALF:])]
        for found, problem in (
            (hidden @ self._table.T, "its logits do not follow from its last hidden state"),
            (_logits_of(Outputs.concatenate(parts)), "it does not go on from keys and values of what it has read"),
        ):
            if not _nearly_equal(found, logits):
                raise InputError(f"{self.path}: {problem}, so a memory cannot be mixed in; use --backend torch")

    def _shortens_exactly(self) -> bool:
        """Returns whether a text that was shortened goes on as if it had never been longer."""
        _, logits = self._read_probe()
        with self._whole_text() as whole:
            self.read([(whole, [*self._probe[:_HALF], *self._probe[: _PROBE - _HALF]])])
            try:
                self.shorten(whole, _HALF)
                rest = self.read([(whole, self._probe[_HALF:])])[0]
            except (InputError, RuntimeError):
                return False
        return _nearly_equal(_logits_of(rest), logits[_HALF:])

    @property
    def _probe(self) -> list[int]:
        """The tokens on which the model is checked."""
        return [token % self.vocabulary for token in range(1, 1 + _PROBE)]

    def _read_probe(self) -> tuple[Tensor, Tensor]:
        """Returns hidden states and logits of the tokens on which the model is checked, read at once."""
        with self._whole_text() as whole:
            found = self.read([(whole, self._probe)])[0]
        return found.hidden, _logits_of(found)


def _logits_of(outputs: Outputs) -> Tensor:
    """Returns the logits of outputs that have them."""
    assert outputs.logits is not None
    return outputs.logits


def _nearly_equal(found: Tensor, expected: Tensor) -> bool:
    """Returns whether logits are equal but for the rounding of quantised weights."""
    return bool((found - expected).square().mean().sqrt() <= _TOLERANCE * expected.std())


def _last_of_each(lengths: Sequence[int], counts: Sequence[int]) -> Bool[np.ndarray, "n"]:
    """Returns a mask of the last `counts[i]` positions of each piece of `lengths[i]` positions, piece after piece."""
    if list(lengths) == list(counts):
        return np.ones(sum(lengths), bool)
    return np.concatenate([np.arange(length) >= length - count for length, count in zip(lengths, counts)])


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


def _free(api: Any, model: Any, contexts: list[Any]) -> None:
    for context in contexts:
        api.llama_free(context)
    api.llama_model_free(model)
