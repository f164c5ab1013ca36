"""Text from a model with a memory, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spalm.generation.answer import Chunk, FinishReason, GeneratedToken
from spalm.generation.citations import citations_of, cited_sources, memory_share
from spalm.generation.decoder import Decoder, EncodedTokens
from spalm.generation.detokenise import IncrementalDetokeniser
from spalm.generation.sampling import Sampling, pick_token, random_generator


@dataclass(frozen=True)
class GenerationOptions:
    """How tokens are generated, and what is returned besides them."""

    sampling: Sampling
    cite: bool = False
    """Whether sources are looked up."""
    likely: int = 0
    """Number of the likeliest tokens to name beside each token."""


def generate_tokens(
    decoder: Decoder, encoded: EncodedTokens, last: int, options: GenerationOptions
) -> Iterator[GeneratedToken]:
    """Yields the tokens that continue what a decoder has read.

    `encoded` is the decoder's output at its last position, `last` the token that it read there.
    """
    model, sampling = decoder.model, options.sampling
    detokeniser = IncrementalDetokeniser(model.tokeniser, [last])
    random = random_generator(sampling, model.device)
    for number in range(1, sampling.max_tokens + 1):
        combined, retrieved = decoder.predict(encoded, last)
        log_probabilities = combined.log_probabilities[0]
        last = pick_token(log_probabilities, sampling, random)
        ends = last in model.tokeniser.end_tokens
        reason: FinishReason | None = "stop" if ends else "length" if number == sampling.max_tokens else None
        text = "" if ends else detokeniser.add(last)
        share = memory_share(combined, retrieved, last)
        cited = options.cite and share > 0
        best = log_probabilities.topk(min(options.likely, len(log_probabilities)))
        yield GeneratedToken(
            id=last,
            text=text + detokeniser.rest() if reason else text,
            log_probability=float(log_probabilities[last]),
            memory_share=share,
            sources=cited_sources(model.store.entries(), combined, retrieved, last) if cited else [],
            likely=list(zip(best.indices.tolist(), best.values.tolist())),
            finish_reason=reason,
        )
        if reason:
            return
        encoded = decoder.feed([last])


def stream_chunks(decoder: Decoder, encoded: EncodedTokens, last: int, options: GenerationOptions) -> Iterator[Chunk]:
    """Yields the answer in chunks, cut at stop texts; the last chunk has the citations if they are wanted."""
    shown: list[GeneratedToken] = []
    for chunk in cut_at_stops(generate_tokens(decoder, encoded, last, options), options.sampling.stop):
        shown += chunk.tokens
        ended = options.cite and chunk.finish_reason is not None
        yield replace(chunk, citations=citations_of(shown)) if ended else chunk


def cut_at_stops(tokens: Iterator[GeneratedToken], stops: list[str]) -> Iterator[Chunk]:
    """Yields an answer in chunks and cuts it where the first stop text begins.

    Each token yields a chunk with the text that is certain by then. Text that may be the beginning of a stop text is
    held back, with its tokens, until that is decided.
    """
    text, shown = "", 0
    held: list[tuple[int, GeneratedToken]] = []
    for token in tokens:
        held.append((len(text), token))
        text += token.text
        found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if found:
            end = min(found)
            cut = [replace(one, text=one.text[: end - begin]) for begin, one in held if begin < end]
            yield Chunk(text[shown:end], cut, "stop", generated=1)
            return
        overlap = 0 if token.finish_reason else max((_overlap(text, stop) for stop in stops), default=0)
        certain = len(text) - overlap
        sure = [one for begin, one in held if token.finish_reason or begin < certain >= begin + len(one.text)]
        held = held[len(sure) :]
        yield Chunk(text[shown:certain], sure, token.finish_reason, generated=1)
        shown = certain


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
