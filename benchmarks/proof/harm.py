"""Part 4: what a memory of one domain does to everything else: tasks and text that have nothing to do with it.

Everything is scored twice, by the model alone and with the memory. PIQA: of two solutions to a goal the one with the
higher likelihood, also by token, is chosen. GSM8K: the likelihood of the solution after the problem.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from proof import intervals
from proof.curves import DomainTexts
from proof.scores import off_and_on, stream_of, sums_of_tails
from proof.study import SEED, Study
from spalm.attachment import Attached
from spalm.attachment.fitting.measuring import sums_by_document
from spalm.console import say


def _read(path: Path, most: int) -> list[dict[str, Any]]:
    """Returns at most so many problems of a file, drawn at random."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = np.sort(np.random.default_rng(SEED).permutation(len(lines))[:most])
    return [json.loads(lines[number]) for number in chosen]


def continuations(attached: Attached, pairs: list[tuple[str, str]]) -> dict[str, dict[str, list[float]]]:
    """Returns log p of continuations of prompts, off and on, and their numbers of tokens."""
    tokeniser = attached.corpus.tokeniser
    stream = stream_of(attached, [prompt + continuation for prompt, continuation in pairs])
    starts = [len(ids) for ids in tokeniser.encode([prompt.encode() for prompt, _ in pairs])]
    lengths = stream.ends - stream.begins
    starts = np.minimum(starts, lengths - 1).tolist()
    return {
        row: {"log_p": sums_of_tails(scores, stream, starts), "tokens": (lengths - starts).astype(float).tolist()}
        for row, scores in off_and_on(attached, stream).items()
    }


def piqa(attached: Attached, problems: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the accuracy off and on, and the difference in percentage points."""
    pairs = [
        (f"Question: {each['goal']}\nAnswer:", f" {each[solution]}")
        for each in problems
        for solution in ("sol1", "sol2")
    ]
    found: dict[str, Any] = {}
    labels = np.array([each["label"] for each in problems])
    for row, scores in continuations(attached, pairs).items():
        log_p, tokens = np.array(scores["log_p"]).reshape(-1, 2), np.array(scores["tokens"]).reshape(-1, 2)
        found[row] = {
            "accuracy": (log_p.argmax(1) == labels).astype(float).tolist(),
            "accuracy by token": ((log_p / tokens).argmax(1) == labels).astype(float).tolist(),
        }
    result: dict[str, Any] = {"problems": len(problems)}
    for measure in ("accuracy", "accuracy by token"):
        off, on = found["plain"][measure], found["adaptive"][measure]
        result[measure] = {
            "off": asdict(intervals.of_means(off, SEED)),
            "on": asdict(intervals.of_means(on, SEED)),
            "points": asdict(intervals.of_means(100 * (np.array(on) - np.array(off)), SEED)),
        }
    return result


def gsm8k(attached: Attached, problems: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the perplexity of solutions off and on, and its change."""
    pairs = [(f"Question: {each['question']}\nAnswer:", f" {each['answer']}") for each in problems]
    scores = continuations(attached, pairs)
    rows = {"tokens": scores["plain"]["tokens"], **{row: each["log_p"] for row, each in scores.items()}}
    return changes(rows)


def changes(rows: dict[str, list[float]]) -> dict[str, Any]:
    """Returns perplexities off and on, and the change in per cent."""
    found = intervals.of_perplexities(rows, SEED)
    percent = found["adaptive"]["change"]
    return {
        "documents": len(rows["tokens"]),
        "tokens": sum(rows["tokens"]),
        "off": asdict(found["plain"]["perplexity"]),
        "on": asdict(found["adaptive"]["perplexity"]),
        "percent": {name: 100 * value for name, value in asdict(percent).items()},
    }


def other_texts(study: Study, attached: Attached, texts: DomainTexts) -> dict[str, Any]:
    """Returns the change of the perplexity of every domain that is not the memory's."""
    found = {}
    for name in study.sizes.domains:
        if name == texts.name:
            continue
        documents = texts.domains.held_apart(
            name, texts.core, study.sizes.held_out, tokeniser=attached.corpus.tokeniser
        )
        stream = stream_of(attached, documents)
        found[name] = changes(sums_by_document(off_and_on(attached, stream), stream))
        say(f"proof: {name} with a memory of {texts.name}: {found[name]['percent']['value']:+.2f}%")
    return found


def harm(study: Study) -> dict[str, Any]:
    """Returns what a memory of the first domain, without a library, does to tasks and to other texts."""
    sizes = study.sizes
    name = sizes.domains[0]

    def make() -> dict[str, Any]:
        texts = DomainTexts.of(study, name)
        attached, _ = texts.attach(study, sizes.core, None)
        own = attached.combiner_artifact.facts["documents"]["test"]
        folder = study.data / "questions"
        return {
            "memory": name,
            "own": changes({row: own[row] for row in ("tokens", "plain", "adaptive")}),
            "texts": other_texts(study, attached, texts),
            "piqa": piqa(attached, _read(folder / "piqa-valid.jsonl", sizes.problems)),
            "gsm8k": gsm8k(attached, _read(folder / "gsm8k-test.jsonl", sizes.problems)),
        }

    return study.made("harm", [name, sizes.domains, sizes.of_memory, sizes.problems], make)
