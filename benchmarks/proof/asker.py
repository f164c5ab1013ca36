"""Questions in, answers with their citations out: several side by side, in one of several forms of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spalm.console import bar
from spalm.generation import AnswerBatch, AnswerRequest, Chunk, GenerationOptions, Model, RankedPassage, Sampling
from spalm.generation.passages import fit_passages, message_with_passages, text_with_passages
from spalm.server.openai.chat_template import ChatTemplate
from spalm.server.openai.protocol import ChatMessage

FORMS = ("chat", "completion", "completion with examples")
"""Forms of a prompt: a message of a conversation, a text that the answer continues, such a text with two examples."""
_ANSWER_TOKENS = 24
_LONGEST = 2048
"""Highest number of tokens of a prompt and its answer."""
_SIDE_BY_SIDE = 8
"""Number of answers that are generated at a time."""
_INSTRUCTION = "Answer with a few words only."


@dataclass(frozen=True)
class AskingSettings:
    """How questions are asked."""

    form: str
    passages: int
    """Number of passages in the prompt."""
    memory: bool
    """Whether the token memory is used."""


def completion_prompt(question: str, examples: Sequence[tuple[str, str]]) -> str:
    """Returns a text that the answer continues, with examples of questions and answers before it."""
    shown = [f"Question: {asked}\nAnswer: {answer}" for asked, answer in examples]
    return "\n\n".join([*shown, f"Question: {question}\nAnswer:"])


class Asker:
    """Asks a model with a memory of paragraphs."""

    def __init__(self, model: Model, examples: Sequence[tuple[str, str]]):
        """`examples` are questions with their answers, for the form that has some."""
        self._model, self._examples = model, examples

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self._model.models.directory)

    @property
    def forms(self) -> list[str]:
        """The forms that the model has."""
        return [form for form in FORMS if form != "chat" or self._chat.exists]

    def _prompt(self, question: str, form: str, passages: list[RankedPassage]) -> list[int]:
        """Returns the tokens of a question with passages."""
        tokeniser = self._model.tokeniser
        if form != "chat":
            examples = self._examples if form == "completion with examples" else []
            return tokeniser.prompt(text_with_passages(completion_prompt(question, examples), passages))
        content = message_with_passages(f"{question} {_INSTRUCTION}", passages)
        return self._chat.prompt(tokeniser, [ChatMessage(role="user", content=content)]).tokens

    def _request(self, question: str, settings: AskingSettings) -> AnswerRequest:
        model = self._model
        room = None if model.max_length is None else min(model.max_length, _LONGEST) - _ANSWER_TOKENS
        found = model.passages(question, count=settings.passages)
        tokens, used = fit_passages(
            found, lambda those: self._prompt(question, settings.form, those), model.tokeniser, room=room
        )
        sampling = Sampling.parse({"max_tokens": _ANSWER_TOKENS, "temperature": 0, "stop": ["\n"]}, "questions")
        return AnswerRequest(tokens, GenerationOptions(sampling, cite=True), use_memory=settings.memory, passages=used)

    def answers(self, questions: Sequence[str], settings: AskingSettings, title: str) -> list[dict[str, Any]]:
        """Returns the answer to each question, the documents that its citations name first, and those of its passages.

        Answers are generated side by side.
        """
        batch, numbers, chunks = AnswerBatch(self._model, _SIDE_BY_SIDE), {}, [[] for _ in questions]
        passages: list[list[str]] = []
        with bar(title, len(questions)) as shown:
            while len(passages) < len(questions) or batch.running:
                while batch.has_room and len(passages) < len(questions):
                    answer = batch.add(self._request(questions[len(passages)], settings))
                    numbers[answer] = len(passages)
                    passages.append([passage.document for passage in answer.request.passages])
                for answer, new in batch.step():
                    if answer.error is not None:
                        raise answer.error
                    chunks[numbers[answer]] += new
                    shown.advance(answer.finished)
        return [{**_joined(each), "passages": documents} for each, documents in zip(chunks, passages)]


def _joined(chunks: list[Chunk]) -> dict[str, Any]:
    """Returns an answer, and the documents that its citations name first."""
    cited = [citation.document for citation in chunks[-1].citations or []]
    return {"text": "".join(chunk.text for chunk in chunks).strip(), "cited": cited}
