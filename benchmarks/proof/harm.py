"""Part 4: what a memory of one domain does to everything else: tasks and text that have nothing to do with it.

Everything is scored by the model alone, with the memory of the domain's core, and with one that has a large library.
PIQA: of two solutions to a goal the one with the higher likelihood, also by token, is chosen. GSM8K: the likelihood of
the solution after the problem, without the annotations of calculations.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from proof import intervals
from proof.curves import DomainTexts, largest_of_curve
from proof.domains import COLLECTIONS, DOMAINS
from proof.scores import entries_searched, off_and_on, stream_of
from proof.study import SEED, Study
from spalm.attachment import Attached
from spalm.attachment.fitting.measuring import sums_by_document
from spalm.errors import InputError

Memories = Mapping[str, Attached]
"""Models with a memory of one domain, by what the memory holds."""
_AT_ONCE = 250
"""Number of problems that are scored together, after which what was found is kept."""
_ANNOTATION = re.compile(r"<<.*?>>")
"""A calculation that stands beside its result in solutions of GSM8K: its last tokens are nearly certain."""


def memories_of(study: Study, texts: DomainTexts) -> dict[str, Attached]:
    """Returns the memory of the core, and the largest of the curves or, if that is not there, one with a library."""
    core, _ = texts.attach(study, study.sizes.core, 0)
    largest = study.finished(texts.memory_name(study, *largest_of_curve(study)))
    if largest is None:
        largest, _ = texts.attach(study, study.sizes.core, study.sizes.core + study.sizes.harm_library)
    return {"core": core, "with a library": largest}


def _read(path: Path, most: int) -> list[dict[str, Any]]:
    """Returns at most so many problems of a file, drawn at random."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = np.sort(np.random.default_rng(SEED).permutation(len(lines))[:most])
    return [json.loads(lines[number]) for number in chosen]


def shared_beginning(one: np.ndarray, other: np.ndarray) -> int:
    """Returns the number of tokens with which two texts begin alike."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def continuations(memories: Memories, pairs: list[tuple[str, str]]) -> dict[str, list[float]]:
    """Returns the number of tokens of continuations of prompts and, by row, the sums of log p over them.

    A token of both the prompt and the continuation belongs to the latter.
    """
    attached = next(iter(memories.values()))
    stream = stream_of(attached, [prompt + continuation for prompt, continuation in pairs])
    prompts = attached.corpus.tokeniser.encode([prompt.encode() for prompt, _ in pairs])
    bounds = list(zip(stream.begins.tolist(), stream.ends.tolist()))
    starts = [
        min(begin + shared_beginning(prompt, stream.tokens[begin:end]), end - 1)
        for prompt, (begin, end) in zip(prompts, bounds)
    ]
    rows = np.concatenate([np.arange(start, end) for start, (_, end) in zip(starts, bounds)])
    sums = sums_by_document(off_and_on(memories, stream, rows), stream)
    return {**sums, "tokens": [float(end - start) for start, (_, end) in zip(starts, bounds)]}


def piqa_figures(problems: list[dict[str, Any]], scores: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the accuracy off and on, which answers changed, and the change of the margin of the right solution."""
    labels = np.array([each["label"] for each in problems])
    tokens = np.array(scores["tokens"]).reshape(-1, 2)
    both = {row: np.array(sums).reshape(-1, 2) for row, sums in scores.items() if row != "tokens"}
    result: dict[str, Any] = {"problems": len(problems)}
    for measure, lengths in (("accuracy", 1), ("accuracy by token", tokens)):
        log_p = {row: each / lengths for row, each in both.items()}
        right = {row: (each.argmax(1) == labels).astype(float) for row, each in log_p.items()}
        own = {row: each[np.arange(len(labels)), labels] for row, each in log_p.items()}
        margins = {row: own[row] - each[np.arange(len(labels)), 1 - labels] for row, each in log_p.items()}
        off = right.pop("plain")
        result[measure] = {
            "off": asdict(intervals.of_means(off.tolist(), SEED)),
            "on": {
                row: {
                    "accuracy": asdict(intervals.of_means(on.tolist(), SEED)),
                    "points": asdict(intervals.of_means((100 * (on - off)).tolist(), SEED)),
                    "to right": int((on > off).sum()),
                    "to wrong": int((on < off).sum()),
                    "margin": asdict(intervals.of_means((margins[row] - margins["plain"]).tolist(), SEED)),
                }
                for row, on in right.items()
            },
        }
    return result


def changes(rows: Mapping[str, list[float]]) -> dict[str, Any]:
    """Returns perplexities off and on, and the changes in per cent."""
    found = intervals.of_perplexities(rows, SEED)
    return {
        "documents": len(rows["tokens"]),
        "tokens": sum(rows["tokens"]),
        "off": asdict(found.pop("plain")["perplexity"]),
        "on": {
            row: {
                "perplexity": asdict(each["perplexity"]),
                "percent": {name: 100 * value for name, value in asdict(each["change"]).items()},
            }
            for row, each in found.items()
        },
    }


def solution(answer: str) -> str:
    """Returns a solution of GSM8K without the annotations of calculations and the mark of the result."""
    return _ANNOTATION.sub("", answer).replace("####", "").replace("  ", " ")


class HarmMeasurement:
    """Scores texts and tasks with the memories of a domain, in parts that are each kept as soon as they are there."""

    def __init__(self, study: Study, texts: DomainTexts):
        self.study, self.texts = study, texts
        self.memories = memories_of(study, texts)
        names = [attached.directory.name for attached in self.memories.values()]
        self._identity = [texts.identity(study), names]

    def own(self) -> dict[str, list[float]]:
        """Returns the sums of log p over the documents of test, which are the same beside all memories."""
        found: dict[str, list[float]] = {}
        for row, attached in self.memories.items():
            documents = attached.combiner_artifact.facts["documents"]["test"]
            found |= {"tokens": documents["tokens"], "plain": documents["plain"], row: documents["adaptive"]}
        return found

    def text(self, name: str) -> dict[str, list[float]]:
        """Returns the sums of log p over documents of another domain or collection."""

        def make() -> dict[str, list[float]]:
            tokens, tokeniser = self.study.sizes.other_text, self.texts.tokeniser
            documents = self.texts.domains.unrelated(name, tokens, tokeniser)
            if not documents:
                raise InputError(f"{self.study.data} has no text of {name} that no memory holds; add some")
            stream = stream_of(next(iter(self.memories.values())), documents)
            return sums_by_document(off_and_on(self.memories, stream), stream)

        return self.study.made(f"harm-{name}", [self._identity, self.study.sizes.other_text], make)

    def task(
        self, name: str, problems: list[dict[str, Any]], pairs: Callable[[dict[str, Any]], list[tuple[str, str]]]
    ) -> dict[str, list[float]]:
        """Returns the sums of log p over the continuations that problems have, in the order of the problems."""
        whole: dict[str, list[float]] = {}
        for start in range(0, len(problems), _AT_ONCE):
            part = problems[start : start + _AT_ONCE]
            scores = self.study.made(
                f"harm-{name}-{start}",
                [self._identity, part],
                lambda part=part: continuations(self.memories, [pair for each in part for pair in pairs(each)]),
            )
            whole = {row: [*whole.get(row, []), *sums] for row, sums in scores.items()}
        return whole


def _piqa_pairs(problem: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f"Question: {problem['goal']}\nAnswer:", f" {problem[each]}") for each in ("sol1", "sol2")]


def _gsm8k_pairs(problem: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f"Question: {problem['question']}\nAnswer:", f" {solution(problem['answer'])}")]


def harm(study: Study) -> Iterator[dict[str, Any]]:
    """Yields what memories of the first domain do to tasks and to other texts."""
    sizes, folder = study.sizes, study.data / "questions"
    name = sizes.domains[0]
    measurement = HarmMeasurement(study, DomainTexts.of(study, name))
    others = [each for each in [*DOMAINS, *COLLECTIONS] if each != name]
    piqa, gsm8k = _read(folder / "piqa-valid.jsonl", sizes.piqa), _read(folder / "gsm8k-test.jsonl", sizes.gsm8k)
    yield {
        "memory": name,
        "memories": {row: entries_searched(attached) for row, attached in measurement.memories.items()},
        "own": changes(measurement.own()),
        "texts": {each: changes(measurement.text(each)) for each in others},
        "piqa": piqa_figures(piqa, measurement.task("piqa", piqa, _piqa_pairs)),
        "gsm8k": changes(measurement.task("gsm8k", gsm8k, _gsm8k_pairs)),
    }
