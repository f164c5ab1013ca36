"""Generation jobs: what a request asks for, as requests for single answers."""

from dataclasses import dataclass

from spalm.corpus import Tokeniser
from spalm.generation import AnswerRequest, GenerationOptions, MemorySelection, RankedPassage, Sampling, token_texts


@dataclass(frozen=True)
class TokenisedPrompt:
    """A prompt as the model reads it."""

    tokens: list[int]
    text: str | None = None
    """The text that was tokenised; None: tokens were given. Special tokens that precede a text are not echoed."""
    passages: list[RankedPassage] | None = None
    """Passages of the memory that are in it; None: none were asked for."""

    @classmethod
    def of(cls, tokeniser: Tokeniser, prompt: str | list[int]) -> "TokenisedPrompt":
        """Tokenises a prompt."""
        if isinstance(prompt, str):
            return cls(tokeniser.prompt(prompt), prompt)
        return cls(prompt or [tokeniser.start])

    def token_texts(self, tokeniser: Tokeniser) -> list[str]:
        """Returns the text that each token adds when the prompt is echoed."""
        texts = token_texts(tokeniser, self.tokens)
        return texts if self.text is None else _without_prefix(self.text, texts)


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
    memories: MemorySelection | None = None
    """Memories that are used, if any is; None: all that are open."""
    cite: bool = False
    """Whether answers end with their citations."""
    draft: bool = True
    """Whether the next tokens may be guessed from the memory."""

    def passages_of(self, choice: int) -> list[RankedPassage] | None:
        """Returns the passages in the prompt of an answer, given by its number; None: none were asked for."""
        return self.prompts[choice // self.n].passages

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def listed_tokens(self) -> int:
        """Highest number of tokens in all answers, with those of echoed prompts and the likely ones of each."""
        generated = 0 if self.sampling is None else len(self.prompts) * self.sampling.max_tokens
        return self.n * (generated + (self.prompt_tokens if self.echo else 0)) * (1 + (self.likely or 0))

    def requests(self, tokeniser: Tokeniser) -> list[AnswerRequest]:
        """Returns the answers to be generated, those to the same prompt side by side."""
        found = []
        for prompt in self.prompts:
            echo = prompt.token_texts(tokeniser) if self.echo else None
            first = len(found)
            found += [
                AnswerRequest(
                    prompt.tokens,
                    self._options(number),
                    self.use_memory,
                    echo,
                    choice=first + number,
                    memories=self.memories,
                    passages=prompt.passages or [],
                )
                for number in range(self.n)
            ]
        return found

    def _options(self, number: int) -> GenerationOptions:
        """Returns the options of the `number`-th answer to a prompt."""
        sampling = self.sampling
        if sampling is not None and sampling.seed is not None:  # answers to one prompt differ, but are reproducible
            sampling = sampling.model_copy(update={"seed": sampling.seed + number})
        scored = self.echo and self.likely is not None
        return GenerationOptions(sampling, self.cite, self.likely or 0, self.draft, scored)
