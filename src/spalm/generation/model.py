"""A language model with its memory, ready to use: the object behind the Python API, the server and the CLI."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from spalm.attachment import ALWAYS_SEARCH, SearchPolicy, score_files
from spalm.corpus import Tokeniser
from spalm.errors import InputError
from spalm.generation.answer import Answer, Chunk
from spalm.generation.decoding.batch import AnswerRequest, RunningAnswer
from spalm.generation.decoding.decoder import Decoder
from spalm.generation.decoding.drafts import DraftRecord
from spalm.generation.decoding.generate import GenerationOptions, advance
from spalm.generation.decoding.pass_times import PassTimes
from spalm.generation.decoding.sampling import Sampling, SamplingOptions
from spalm.generation.documents import DocumentService
from spalm.generation.memories import MemorySelection
from spalm.generation.models import AttachedModels, ModelSet, Variant
from spalm.generation.passages import RankedPassage, fit_passages, text_with_passages
from spalm.generation.score import Score, read_states, score_of, score_variant, stream_of_text
from spalm.generation.trace import TracedSpan, trace_text
from spalm.lm import LanguageModel, Reading
from spalm.memory import Encoder, Memory
from spalm.memory.exact import LEAST, reversed_contexts
from spalm.semiparametric import Combiner, Retrieved, Search

if TYPE_CHECKING:
    from spalm.generation.hugging_face.model import SpalmForCausalLM
    from spalm.generation.inspection.explain import ExplainedPosition
    from spalm.generation.inspection.explorer import Explorer


@dataclass(frozen=True)
class Model:
    """A pretrained model with a memory, or one of the models of a finished run.

    `spalm.load` opens one, `spalm.attach` makes one.
    """

    name: str
    """Name by which clients of the server ask for the model."""
    models: ModelSet
    """All models of the directory; they share networks, memory and index."""
    variant: Variant
    """The network, and the way the memory is combined with it."""
    policy: SearchPolicy | None = None
    """Decides which positions are searched while text is generated; None: all."""
    threshold: float = ALWAYS_SEARCH
    """Expected gain above which a position is searched."""

    # Uses of a model

    def generate(
        self,
        prompt: str,
        *,
        memory: bool = True,
        cite: bool = True,
        draft: bool = False,
        passages: int = 0,
        memories: Iterable[str] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Continues a prompt.

        `memory=False` uses the network alone; `cite=False` looks up no sources; `draft=True` reads ahead what the
        memory expects, which takes fewer passes of the network and changes no token but for rounding. `passages` is the
        number of passages of the memory that are put before the prompt, fewer if there is no room. `memories` are the
        names of the memories that are used, by default all that are open. Further keyword arguments are the fields of
        `Sampling`: max_tokens, temperature, top_p, top_k, stop, seed.
        """
        used: dict[str, Any] = {"memory": memory, "passages": passages, "memories": memories}
        chunks = list(self.stream(prompt, cite=cite, draft=draft, **used, **sampling))
        last = chunks[-1]
        assert last.finish_reason is not None
        text, tokens = "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.tokens]
        return Answer(text, tokens, last.finish_reason, last.citations or [], last.passages or [])

    def stream(
        self,
        prompt: str,
        *,
        memory: bool = True,
        cite: bool = True,
        draft: bool = False,
        passages: int = 0,
        memories: Iterable[str] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """Yields in chunks what `generate` returns whole."""
        chosen = Sampling.parse(sampling, "generate")
        options = GenerationOptions(chosen, cite=cite, draft=draft)
        room = None if self.max_length is None else self.max_length - chosen.max_tokens
        selected = self.models.memories.select(memories)
        tokens, used = self.prompt_with_passages(prompt, selected.passages(prompt, passages), room)
        request = AnswerRequest(tokens, options, use_memory=memory, memories=selected, passages=used)
        answer = RunningAnswer(request, self.decoder(use_memory=memory, memories=selected))
        while not answer.finished:
            for chunk in answer.chunks(advance([answer.generation])[0]):
                yield chunk if chunk.finish_reason is None else replace(chunk, passages=used)

    def passages(self, text: str, *, count: int = 2, memories: Iterable[str] | None = None) -> list[RankedPassage]:
        """Returns the paragraphs of the memories that fit a text best, by BM25, the best first.

        The first call divides all documents into paragraphs, which takes a while for a large memory.
        """
        return self.models.memories.select(memories).passages(text, count)

    def prompt_with_passages(
        self, prompt: str, passages: list[RankedPassage], room: int | None
    ) -> tuple[list[int], list[RankedPassage]]:
        """Returns the tokens of a prompt with passages before it, as far as they fit, and the passages that do."""

        def render(used: list[RankedPassage]) -> list[int]:
            return self.tokeniser.prompt(text_with_passages(prompt, used))

        return fit_passages(passages, render, self.tokeniser, room=room)

    def score(self, text: str, *, memories: Iterable[str] | None = None) -> Score:
        """Returns the log-probability of every token of a text, and its perplexity, with and without the memories.

        Every position is searched; the search policy is not used.
        """
        stream, selected = stream_of_text(text, "text", self.tokeniser), self.models.memories.select(memories)
        if not len(stream):
            raise InputError("the text is empty; give one with at least a token")
        hidden = read_states(self.variant.network, stream, 0, last=len(stream))
        retrieved = Retrieved.empty(len(stream))
        if self.combiner.uses_neighbours and selected.has_keys:
            to_keys, width = self.store.keys_of, self.store.width
            retrieved = selected.nearest(self.encoder.keys(stream, 0, len(stream), to_keys=to_keys, width=width))
        if self.combiner.uses_matches:
            retrieved = selected.add_matches(retrieved, reversed_contexts(stream, np.arange(len(stream))))
        retrieved = retrieved.to(self.device)
        targets = torch.from_numpy(stream.tokens).to(self.device)
        texts = [self.tokeniser.spell(token) for token in stream.tokens.tolist()]
        return score_of(texts, score_variant(self.variant, hidden, targets, retrieved=retrieved))

    def score_files(self, paths: list[Path]) -> dict[str, Any]:
        """Returns perplexities of files that the memory does not hold: static and dynamic, as `spalm score` prints."""
        if not isinstance(self.models, AttachedModels):
            raise InputError(f"{self.models.directory} is a run; `score_files` takes what `spalm attach` made")
        return score_files(self.models.attached, paths)

    def explain(self, text: str, position: int) -> "ExplainedPosition":
        """Returns what the memory does at one token of a text: its neighbours, their weights and sources."""
        from spalm.generation.inspection.explain import explain_position

        return explain_position(self.explorer, self.variant.name, text, position=position)

    def trace(self, text: str, *, least: int = LEAST) -> list[TracedSpan]:
        """Returns the spans of a text that stand word for word in the directory's own memory, longest first.

        Spans have at least `least` tokens. They may overlap, but none is part of another.
        """
        return trace_text(text, self.tokeniser, self.store, least=least)

    @torch.inference_mode()
    def embed(self, text: str) -> list[float]:
        """Returns a vector of length 1 for a text: the mean of the network's hidden states; zeros for an empty text."""
        stream = stream_of_text(text, "text", self.tokeniser)
        if not len(stream):
            return [0.0] * self.network.width
        mean = read_states(self.variant.network, stream, 0, last=len(stream)).float().mean(0)
        return torch.nn.functional.normalize(mean, dim=0).tolist()

    def to_transformers(self) -> "SpalmForCausalLM":
        """Returns the model as a causal LM of transformers, for `generate`, `pipeline` and the like."""
        from spalm.generation.hugging_face.model import SpalmForCausalLM

        return SpalmForCausalLM.of_model(self)

    @property
    def memory(self) -> DocumentService:
        """The documents of the directory's own memory: `add`, `forget`, `documents`."""
        return self.memories[self.models.memories.own]

    @cached_property
    def memories(self) -> dict[str, DocumentService]:
        """The documents of every memory that is open, by its name."""
        return {name: DocumentService(self.models.memories[name]) for name in self.models.memories.names}

    # Parts of a model

    @property
    def network(self) -> LanguageModel:
        """The network that predicts the next token."""
        return self.variant.network.model

    @property
    def reading(self) -> Reading:
        """How the network reads: its segments or windows and its short-term memory."""
        return self.variant.network.reading

    @property
    def combiner(self) -> Combiner:
        """The way the memory is combined with the network."""
        return self.variant.combiner

    @property
    def tokeniser(self) -> Tokeniser:
        """Turns text into tokens and back."""
        return self.models.tokeniser

    @property
    def store(self) -> Memory:
        """The memory on disk."""
        return self.models.memory

    @property
    def encoder(self) -> Encoder:
        """Computes the keys with which the memory is searched."""
        return self.models.encoder

    @property
    def search(self) -> Search:
        """Live search of the memory."""
        return self.models.search

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self.models.device

    @property
    def max_length(self) -> int | None:
        """Number of tokens that a text may have; None: any."""
        return self.network.context_length

    @cached_property
    def pass_times(self) -> PassTimes:
        """How long the network takes for how many tokens, measured while text is generated."""
        return PassTimes()

    @cached_property
    def draft_record(self) -> DraftRecord:
        """How often drafts were right so far."""
        return DraftRecord()

    @cached_property
    def explorer(self) -> "Explorer":
        """Explains passages, token by token, with every model of the directory."""
        from spalm.generation.inspection.explorer import Explorer

        return Explorer(self.models)

    def decoder(self, *, use_memory: bool = True, memories: MemorySelection | None = None) -> Decoder:
        """Returns a decoder that has read nothing yet; `memories` are those that it searches, None: all."""
        return Decoder(self, use_memory=use_memory, memories=memories)
