"""Generation jobs: what a request asks for, and the chunks of its answers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from spalm.corpus import Tokeniser
from spalm.generation import (
    Chunk,
    Decoder,
    EncodedTokens,
    GeneratedToken,
    GenerationOptions,
    Model,
    Sampling,
    stream_chunks,
    token_texts,
)
from spalm.server.openai.protocol import Prompt


@dataclass(frozen=True)
class TokenisedPrompt:
    """A prompt as the model reads it."""

    tokens: list[int]
    texts: list[str]
    """Text that each token adds when the prompt is echoed."""

    @classmethod
    def of(cls, tokeniser: Tokeniser, prompt: Prompt) -> "TokenisedPrompt":
        """Tokenises a prompt. Special tokens that precede a text are read by the model but not echoed."""
        if not isinstance(prompt, str):
            tokens = prompt or [tokeniser.start]
            return cls(tokens, token_texts(tokeniser, tokens))
        tokens = tokeniser.prompt(prompt)
        return cls(tokens, _without_prefix(prompt, token_texts(tokeniser, tokens)))


def _without_prefix(text: str, texts: list[str]) -> list[str]:
    """Drops what precedes `text` in the tokens' `texts`; keeps everything if they do not end with it."""
    whole = "".join(texts)
    before = len(whole) - len(text) if whole.endswith(text) else 0
    found = []
    for each in texts:
        found.append(each[before:])
        before = max(0, before - len(each))
    return found


@dataclass(frozen=True)
class GenerationJob:
    """Everything that is to be generated for a request."""

    prompts: list[TokenisedPrompt]
    sampling: Sampling | None
    """How tokens are picked; None: nothing is to be generated."""
    n: int = 1
    """Number of answers to each prompt."""
    echo: bool = False
    """Whether answers begin with the prompt."""
    likely: int | None = None
    """Number of likely tokens to list for each token; None: no log-probabilities are wanted."""
    use_memory: bool = True
    cite: bool = False
    """Whether answers end with their citations."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def run(self, model: Model) -> Iterator[Chunk]:
        """Yields the chunks of all answers, one answer after the other."""
        choice = 0
        for prompt in self.prompts:
            for number in range(self.n):
                yield from (replace(chunk, choice=choice) for chunk in self._answer(model, prompt, number))
                choice += 1

    def _answer(self, model: Model, prompt: TokenisedPrompt, number: int) -> Iterator[Chunk]:
        """Yields the chunks of one answer to a prompt, the `number`-th of n."""
        decoder = model.decoder(use_memory=self.use_memory)
        encoded = decoder.feed(prompt.tokens)
        if self.echo and self.likely is not None:
            for tokens in score_prompt(decoder, encoded, prompt, self.likely):
                yield Chunk("".join(token.text for token in tokens), tokens)
        elif self.echo:
            yield Chunk("".join(prompt.texts))
        sampling = self.sampling
        if sampling is None:
            yield Chunk(finish_reason="length")
            return
        if sampling.seed is not None:  # answers to one prompt differ, but are reproducible
            sampling = sampling.model_copy(update={"seed": sampling.seed + number})
        options = GenerationOptions(sampling, self.cite, self.likely or 0)
        yield from stream_chunks(decoder, encoded[-1:], prompt.tokens[-1], options)


@torch.inference_mode()
def score_prompt(
    decoder: Decoder, encoded: EncodedTokens, prompt: TokenisedPrompt, likely: int
) -> Iterator[list[GeneratedToken]]:
    """Yields the tokens of a prompt, which `decoder` has read, with log-probabilities; the first has none."""
    tokens, texts = prompt.tokens, prompt.texts
    yield [GeneratedToken(tokens[0], texts[0], None)]
    for start in range(0, len(tokens) - 1, decoder.at_once):
        stop = min(start + decoder.at_once, len(tokens) - 1)
        log_probabilities = decoder.predict(encoded[start:stop], tokens[stop - 1])[0].log_probabilities
        best = log_probabilities.topk(min(likely, log_probabilities.shape[1]))
        targets = torch.tensor(tokens[start + 1 : stop + 1], device=best.values.device)[:, None]
        values = log_probabilities.gather(1, targets)[:, 0].tolist()
        yield [
            GeneratedToken(tokens[place], texts[place], value, likely=list(zip(ids, scores)))
            for place, value, ids, scores in zip(
                range(start + 1, stop + 1), values, best.indices.tolist(), best.values.tolist()
            )
        ]
