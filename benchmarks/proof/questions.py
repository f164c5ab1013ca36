"""Part 3: questions on paragraphs that the memory holds, answered in several ways, and the citations of the answers.

The form of the prompt and the number of passages are chosen on questions of every second article, for passages alone;
all ways then have the same. Without passages the token memory is also measured in the form that is best for it. Figures
are those of the other articles. A question counts as answered if the words of a reference stand in the answer. A
citation is right if the document that it names first is the paragraph that the question was written for.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from proof import intervals
from proof.answers import CitationCounts, exact_match, f1, holds_reference
from proof.asker import Asker, AskingSettings
from proof.study import SEED, Study
from spalm.digests import digest_of_json

Question = dict[str, Any]
COUNTS = (1, 2)
"""Numbers of passages that are tried."""
PAIRS = (
    ("token memory", "closed book"),
    ("passages and token memory", "passages"),
    ("token memory, its own form", "closed book, that form"),
)
"""Ways that are compared, question by question."""
COMPARED = ("exact match", "F1", "answered")
"""Figures by which they are."""
_EXAMPLES = 2
"""Number of examples in a prompt."""
_SHOWN = 20
"""Number of answers of each way that are kept with the results."""


@dataclass(frozen=True)
class DividedQuestions:
    """Questions of XQuAD, those that are tuned on and those that are reported of different articles."""

    examples: list[Question]
    """Examples in prompts, of the articles that are tuned on."""
    tuning: list[Question]
    reported: list[Question]

    @classmethod
    def of(cls, questions: list[Question], *, tuning: int, reported: int) -> "DividedQuestions":
        """Draws at most so many questions of both kinds at random."""
        articles = sorted({question["article"] for question in questions})
        to_tune = set(articles[1::2])
        parts = [[each for each in questions if (each["article"] in to_tune) == wanted] for wanted in (True, False)]
        random = np.random.default_rng(SEED)
        orders = [random.permutation(len(part)).tolist() for part in parts]
        return cls(
            _chosen(parts[0], orders[0][:_EXAMPLES]),
            _chosen(parts[0], orders[0][_EXAMPLES : _EXAMPLES + tuning]),
            _chosen(parts[1], orders[1][:reported]),
        )


def _chosen(questions: list[Question], numbers: list[int]) -> list[Question]:
    return [questions[number] for number in sorted(numbers)]


def write_paragraphs(data: Path, folder: Path) -> Path:
    """Writes the paragraphs as documents of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in _lines(data / "questions" / "xquad-paragraphs.jsonl")]
    path = folder / "xquad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def judged(question: Question, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer with its scores."""
    references, paragraph = question["answers"], f"xquad.jsonl/{question['paragraph']}"
    counts, first = CitationCounts.of(answer["cited"], paragraph), answer["passages"][:1]
    return {
        **answer,
        "question": question["question"],
        "references": references,
        "paragraph": paragraph,
        "exact match": exact_match(answer["text"], references),
        "F1": f1(answer["text"], references),
        "answered": float(holds_reference(answer["text"], references)),
        "words": float(len(answer["text"].split())),
        "paragraph in the prompt": float(paragraph in answer["passages"]),
        "citations": float(counts.given),
        "right citations": float(counts.right),
        "cites right": float(counts.found),
        "first passages": float(len(first)),
        "right first passages": float(first == [paragraph]),
    }


class AnswerFigures:
    """Figures of the answers of one way, with intervals over paragraphs: those of one paragraph depend on another."""

    def __init__(self, answers: Sequence[dict[str, Any]]):
        self.answers = answers
        self._paragraphs = [each["paragraph"] for each in answers]

    def ratio(self, parts: Sequence[float], wholes: Sequence[float]) -> dict[str, float]:
        """Returns the sum of some parts divided by that of the wholes, each of one question."""
        above, below = (intervals.sums_by_group(each, self._paragraphs) for each in (parts, wholes))
        return asdict(intervals.of_ratio(above, below, SEED))

    def column(self, name: str, *, answered: bool = False) -> list[float]:
        """Returns a score of every answer; `answered`: 0 for those that do not hold a reference."""
        return [each[name] * (each["answered"] if answered else 1) for each in self.answers]

    def mean(self, name: str) -> dict[str, float]:
        """Returns the mean of a score."""
        return self.ratio(self.column(name), [1.0] * len(self.answers))

    def all(self) -> dict[str, Any]:
        """Returns all figures by their names."""
        found = {name: self.mean(name) for name in (*COMPARED, "words", "paragraph in the prompt")}
        for title, answered in (("answered questions", True), ("all questions", False)):
            asked = self.column("answered") if answered else [1.0] * len(self.answers)
            given, right, cites, first, right_first = (
                self.column(name, answered=answered)
                for name in ("citations", "right citations", "cites right", "first passages", "right first passages")
            )
            found |= {
                f"citation precision, {title}": self.ratio(right, given),
                f"citation recall, {title}": self.ratio(cites, asked),
                f"first passage is right, {title}": self.ratio(right_first, first),
            }
        return found

    def counts(self) -> dict[str, int]:
        """Returns the denominators: how many questions were answered, and how many citations there are."""
        citations = (sum(self.column("citations", answered=answered)) for answered in (True, False))
        names = ("citations, answered questions", "citations, all questions")
        return {"answered": int(sum(self.column("answered"))), **dict(zip(names, map(int, citations)))}

    def beyond(self, other: "AnswerFigures") -> dict[str, dict[str, float]]:
        """Returns how much higher these figures are than those of another way, of the paired differences."""
        ones = [1.0] * len(self.answers)
        return {
            name: self.ratio([a - b for a, b in zip(self.column(name), other.column(name), strict=True)], ones)
            for name in COMPARED
        }


class QuestionStudy:
    """Tunes the form of the prompts, and answers the questions in all ways; each setting and way is kept."""

    def __init__(self, study: Study, questions: DividedQuestions):
        self._study, self._questions = study, questions
        self._paragraphs = write_paragraphs(study.data, study.directory / "texts")
        self._settings = study.settings()
        self._attached, self.clock = study.attach("xquad", [self._paragraphs], self._settings)

    @cached_property
    def _asker(self) -> Asker:
        examples = [(each["question"], each["answers"][0]) for each in self._questions.examples]
        return Asker(self._study.load(self._attached), examples)

    def answers(self, title: str, questions: list[Question], settings: AskingSettings) -> AnswerFigures:
        """Returns the answers to some questions."""

        def make() -> list[dict[str, Any]]:
            found = self._asker.answers([each["question"] for each in questions], settings, f"questions: {title}")
            return [judged(question, answer) for question, answer in zip(questions, found, strict=True)]

        asked = digest_of_json([questions, self._questions.examples])
        identity = [asked, asdict(settings), self._settings.as_json(), self._paragraphs.read_text(encoding="utf-8")]
        name = f"questions-{title}".replace(" ", "-").replace(",", "")
        return AnswerFigures(self._study.made(name, [digest_of_json(identity)], make))

    def tried(self, *, memory: bool, counts: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the figures of all forms and numbers of passages on the questions to tune on, best F1 first."""
        found = []
        for form in self._asker.forms:
            for count in counts:
                settings = AskingSettings(form, count, memory)
                title = f"tuning {form} {count} passages{' and memory' if memory else ''}"
                figures = self.answers(title, self._questions.tuning, settings)
                values = {name: figures.mean(name)["value"] for name in (*COMPARED, "words")}
                found.append({"settings": asdict(settings), **values})
        return sorted(found, key=lambda each: (-each["F1"], -each["exact match"]))

    def ways(self, for_passages: AskingSettings, for_memory: AskingSettings) -> dict[str, AskingSettings]:
        """Returns the ways to answer: all in the form that is best for passages, and the memory in its own."""
        alone = replace(for_passages, passages=0)
        found = {
            "closed book": alone,
            "token memory": replace(alone, memory=True),
            "passages": for_passages,
            "passages and token memory": replace(for_passages, memory=True),
        }
        if for_memory.form != for_passages.form:
            found["closed book, that form"] = replace(for_memory, memory=False)
            found["token memory, its own form"] = for_memory
        return found

    def reported(self, ways: dict[str, AskingSettings]) -> dict[str, Any]:
        """Returns the figures of all ways, some of their answers, and the differences between pairs of them."""
        asked = self._questions.reported
        answers = {way: self.answers(way, asked, settings) for way, settings in ways.items()}
        shown = np.sort(np.random.default_rng(SEED).permutation(len(asked))[:_SHOWN]).tolist()
        return {
            "ways": {
                way: {
                    "settings": asdict(ways[way]),
                    "figures": each.all(),
                    "counts": each.counts(),
                    "some answers": [each.answers[number] for number in shown],
                }
                for way, each in answers.items()
            },
            "differences": {
                f"{one} - {other}": answers[one].beyond(answers[other]) for one, other in PAIRS if one in answers
            },
        }


def questions(study: Study) -> Iterator[dict[str, Any]]:
    """Yields the figures of all ways to answer, the settings that were tried, and some answers."""
    asked = [json.loads(line) for line in _lines(study.data / "questions" / "xquad-questions.jsonl")]
    divided = DividedQuestions.of(asked, tuning=study.sizes.tuning, reported=study.sizes.questions)
    part = QuestionStudy(study, divided)
    tried = part.tried(memory=False, counts=COUNTS)
    tried_with_memory = part.tried(memory=True, counts=(0,))
    best, best_for_memory = (AskingSettings(**each[0]["settings"]) for each in (tried, tried_with_memory))
    yield {
        "tried": [*tried, *tried_with_memory],
        "chosen": asdict(best),
        "chosen for the token memory": asdict(best_for_memory),
        "tuned_on": len(divided.tuning),
        "reported_on": len(divided.reported),
        "paragraphs": len({each["paragraph"] for each in divided.reported}),
        "attaching": part.clock,
        **part.reported(part.ways(best, best_for_memory)),
    }
