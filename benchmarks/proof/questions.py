"""Part 3: questions on paragraphs that the memory holds, answered in four ways, and the citations of the answers.

The form of the prompt and the number of passages are chosen on the questions of every second article, for passages
alone; all four ways then have the same. Figures are those of the other articles. A question counts as answered if the
words of a reference stand in the answer. A citation is right if the document that it names first is the paragraph that
the question was written for.
"""

import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from proof import intervals
from proof.answers import CitationCounts, exact_match, f1, holds_reference
from proof.study import SEED, Study
from spalm.console import bar
from spalm.files import write_json
from spalm.generation import AnswerRequest, GenerationOptions, Model, RankedPassage, RunningAnswer, Sampling
from spalm.generation.decoding.generate import advance
from spalm.generation.passages import fit_passages, message_with_passages, text_with_passages
from spalm.server.openai.chat_template import ChatTemplate
from spalm.server.openai.protocol import ChatMessage

WAYS = {
    "closed book": {"memory": False, "passages": False},
    "token memory": {"memory": True, "passages": False},
    "passages": {"memory": False, "passages": True},
    "passages and token memory": {"memory": True, "passages": True},
}
"""Ways to answer, by what they use."""
FORMS = ("chat", "completion")
"""Forms of a prompt: a message of a conversation, or a text that the answer continues."""
COUNTS = (1, 2, 3)
"""Numbers of passages that are tried."""
_ANSWER_TOKENS = 24
_INSTRUCTION = "Answer with a few words only."


class Asker:
    """Asks a model with a memory of paragraphs."""

    def __init__(self, model: Model):
        self.model = model

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self.model.models.directory)

    @property
    def forms(self) -> list[str]:
        """The forms that the model has."""
        return [form for form in FORMS if form != "chat" or self._chat.exists]

    def _prompt(self, question: str, form: str, passages: list[RankedPassage]) -> list[int]:
        """Returns the tokens of a question with passages."""
        tokeniser = self.model.tokeniser
        if form == "completion":
            return tokeniser.prompt(text_with_passages(f"Question: {question}\nAnswer:", passages))
        content = message_with_passages(f"{question} {_INSTRUCTION}", passages)
        return self._chat.prompt(tokeniser, [ChatMessage(role="user", content=content)]).tokens

    def ask(self, question: str, *, form: str, passages: int, memory: bool) -> dict[str, Any]:
        """Returns the answer to a question, the documents that its citations name first, and those of the passages."""
        model = self.model
        room = None if model.max_length is None else min(model.max_length, 2048) - _ANSWER_TOKENS
        found = model.passages(question, count=passages)
        tokens, used = fit_passages(
            found, lambda those: self._prompt(question, form, those), model.tokeniser, room=room
        )
        sampling = Sampling.parse({"max_tokens": _ANSWER_TOKENS, "temperature": 0, "stop": ["\n"]}, "questions")
        request = AnswerRequest(tokens, GenerationOptions(sampling, cite=True), use_memory=memory, passages=used)
        answer = RunningAnswer(request, model.decoder(use_memory=memory))
        chunks = []
        while not answer.finished:
            chunks += answer.chunks(advance([answer.generation])[0])
        text = "".join(chunk.text for chunk in chunks)
        cited = [citation.document for citation in chunks[-1].citations or []]
        return {"text": text.strip(), "cited": cited, "passages": [passage.document for passage in used]}


def write_paragraphs(data: Path, folder: Path) -> Path:
    """Writes the paragraphs as documents of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in _lines(data / "questions" / "xquad-paragraphs.jsonl")]
    path = folder / "xquad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def divided(questions: list[dict[str, Any]], most: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns questions to tune on and to report on, of different articles; at most `most` in all, drawn at random."""
    articles = sorted({question["article"] for question in questions})
    tuned = set(articles[::2])
    parts = [[each for each in questions if (each["article"] in tuned) == first] for first in (True, False)]
    random = np.random.default_rng(SEED)
    chosen = [sorted(random.permutation(len(part))[: most // 2].tolist()) for part in parts]
    return [parts[0][number] for number in chosen[0]], [parts[1][number] for number in chosen[1]]


def judged(question: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer with its scores."""
    references, paragraph = question["answers"], f"xquad.jsonl/{question['paragraph']}"
    counts = CitationCounts.of(answer["cited"], paragraph)
    return {
        **answer,
        "question": question["question"],
        "references": references,
        "paragraph": paragraph,
        "exact_match": exact_match(answer["text"], references),
        "f1": f1(answer["text"], references),
        "answered": float(holds_reference(answer["text"], references)),
        "citations": counts.given,
        "right_citations": counts.right,
        "cites_right": float(counts.found),
    }


def figures(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of one way to answer, with intervals over questions."""

    def column(name: str, *, only_answered: bool = False) -> list[float]:
        return [each[name] * (each["answered"] if only_answered else 1) for each in answers]

    found = {
        "exact match": intervals.of_means(column("exact_match"), SEED),
        "F1": intervals.of_means(column("f1"), SEED),
        "answered": intervals.of_means(column("answered"), SEED),
        "right paragraph in the prompt": intervals.of_means(
            [float(each["paragraph"] in each["passages"]) for each in answers], SEED
        ),
    }
    for name, only in (("answered questions", True), ("all questions", False)):
        given = column("citations", only_answered=only)
        right, cites = (column(each, only_answered=only) for each in ("right_citations", "cites_right"))
        whole = column("answered") if only else [1.0] * len(answers)
        found[f"citation precision, {name}"] = intervals.of_ratio(right, given, SEED)
        found[f"citation recall, {name}"] = intervals.of_ratio(cites, whole, SEED)
    return {name: asdict(each) for name, each in found.items()}


def questions(study: Study) -> dict[str, Any]:
    """Returns the figures of all ways to answer, the settings that were tried, and the answers."""
    sizes = study.sizes
    asked = [json.loads(line) for line in _lines(study.data / "questions" / "xquad-questions.jsonl")]
    tuning, reported = divided(asked, sizes.questions)

    def make() -> dict[str, Any]:
        paragraphs = write_paragraphs(study.data, study.directory / "texts")
        attached, clock = study.attach("xquad", [paragraphs], study.settings())
        asker = Asker(study.load(attached))

        def answers(part: list[dict[str, Any]], title: str, **given: Any) -> list[dict[str, Any]]:
            found = []
            with bar(title, len(part)) as shown:
                for question in part:
                    found.append(judged(question, asker.ask(question["question"], **given)))
                    shown.advance()
            return found

        tried = []
        for form in asker.forms:
            for count in COUNTS:
                title = f"questions: {form}, {count} passages"
                scores = figures(answers(tuning, title, form=form, passages=count, memory=False))
                tried.append(
                    {"form": form, "passages": count, **{name: each["value"] for name, each in scores.items()}}
                )
        best = max(tried, key=lambda each: (each["exact match"], each["F1"]))
        ways = {}
        for way, uses in WAYS.items():
            passages = best["passages"] if uses["passages"] else 0
            found = answers(reported, f"questions: {way}", form=best["form"], passages=passages, memory=uses["memory"])
            ways[way] = {"figures": figures(found), "answers": found}
        for way, each in ways.items():
            path = study.directory / "answers" / f"{way.replace(' ', '-')}.json"
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"answers": each.pop("answers")})
        return {
            "tried": tried,
            "chosen": {"form": best["form"], "passages": best["passages"]},
            "tuned_on": len(tuning),
            "reported_on": len(reported),
            "attaching": clock,
            "ways": ways,
        }

    return study.made("questions", [sizes.questions, sizes.of_memory, COUNTS, FORMS], make)
