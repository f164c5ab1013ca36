"""The whole study with a tiny model and tiny corpora: each part, what is kept of it, and the report."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bench_proof import PARTS
from proof.domains import COLLECTIONS
from proof.report import write_report
from proof.study import Sizes, Study
from spalm.attachment.fitting import learning
from support.small_texts import sentences
from support.tiny_models import write_model

pytestmark = pytest.mark.slow
WORDS = ["ka", "lo", "mi", "nu", "po", "ri"]


def article(random: np.random.Generator, kind: str, number: int) -> str:
    """An article of a kind that criteria tell apart; what it says comes again in others of the kind."""
    words = [f"{random.choice(WORDS)}{random.integers(9)}" for _ in range(4)]
    lines = [" ".join(random.choice(words, 6)) + " .\n" for _ in range(5)]
    return f"= {kind} {number} =\na {kind} of {number} .\n{''.join(lines)}\n"


def write_corpora(folder: Path) -> None:
    """Writes the corpora that the study reads, in the form of the real ones."""
    random = np.random.default_rng(0)
    kinds = ("footballer", "genus", "studio album", "film directed by", "Battle of", "disease")
    articles = [article(random, kind, number) for number in range(24) for kind in kinds]
    for name in ("wikipedia", "sotu", "questions", *COLLECTIONS):
        (folder / name).mkdir()
    with gzip.open(folder / "wikipedia" / "train.txt.gz", "wt") as file:
        file.write("".join(articles))
    (folder / "sotu" / "train.txt").write_text("".join(sentences(5, n).replace("\n", " ") + "\n" for n in range(24)))
    (folder / "wikitext-2" / "wiki.test.tokens").write_text(" \n = One = \n \n the cat sat \n = Two = \n a dog \n")
    page = '<text xml:space="preserve">the {} on a mat</text>\n'
    (folder / "enwik8-prefix" / "enwik8.head").write_text("".join(page.format(word) for word in WORDS))
    write_questions(folder / "questions", random)


def write_questions(folder: Path, random: np.random.Generator) -> None:
    """Writes questions and problems."""

    def write(name: str, lines: list[dict]) -> None:
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    names = [f"A{number}" for number in range(6)]
    paragraphs = [
        {"name": f"{name}/{part}", "text": article(random, name, part)} for name in names for part in range(5)
    ]
    questions = [
        {
            "article": name,
            "paragraph": f"{name}/{part}",
            "question": f"a {name} of what {part} ?",
            "answers": [str(part)],
        }
        for name in names
        for part in range(4)
    ]
    write("xquad-paragraphs.jsonl", paragraphs)
    write("xquad-questions.jsonl", questions)
    goals = [{"goal": f"the cat {n}", "sol1": "sat on a mat", "sol2": "slept near", "label": n % 2} for n in range(5)]
    write("piqa-valid.jsonl", goals)
    answers = [{"question": f"how many {n} ?", "answer": f"{n} + 1 = <<{n}+1=2>>2\n#### 2"} for n in range(4)]
    write("gsm8k-test.jsonl", answers)


SIZES = Sizes(
    domains=["footballers", "species"],
    keys=[300, 900],
    exact=[0, 3000],
    core=900,
    positions=256,
    held_out=200,
    own_text=96,
    compared=2,
    compared_core=900,
    compared_positions=200,
    ranks=[2],
    rates=[1e-3],
    doublings=1,
    retrievers=2,
    speeds=2,
    tuning=3,
    questions=4,
    other_text=60,
    harm_library=2000,
    piqa=5,
    gsm8k=4,
    forgotten=3,
)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    """A study whose results are all there."""
    for package in ("peft", "bm25s"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("proof")
    data = folder / "data"
    data.mkdir()
    write_corpora(data)
    with gzip.open(data / "wikipedia" / "train.txt.gz", "rt") as file:
        model = write_model(folder / "model", "llama", file.read() + sentences(40, 0))
    study = Study(folder / "study", data, SIZES, model=str(model))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learning, "_LEAST_STEPS", 20)  # what is learned does not matter here
        carry_out(study)
    return study


def carry_out(study: Study) -> dict:
    """Carries out all parts, and writes the report after each of their results."""
    results = {}
    for name, part in PARTS.items():
        for found in part(study):
            results[name] = json.loads(json.dumps(found))
            write_report(study.directory, results)
    return results


def test_every_part_is_reported_with_its_controls(study):
    report = (study.directory / "report.md").read_text()
    for wanted in (
        "| LoRA of another domain, equal cost |",
        "| RAG with the memory |",
        "| LoRA, until it stops, with the memory |",
        "| enwik8-prefix |",
        "| exact | added, then forgotten | 3 | yes | 0.0e+00 | 100% | 100% |",
        "| memory, exact matches |",
        "completion with examples",
    ):
        assert wanted in report, wanted
    assert report.count("\n## ") == len(PARTS)


def test_nothing_is_made_twice(study, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in (study.directory / "made").iterdir()}
    again = Study(study.directory, study.data, SIZES, model=study._model)

    def refuse(*_, **__):
        raise AssertionError("made before")

    for name in ("proof.study.attach_memory", "proof.lora_rows.train_lora", "spalm.generation.AnswerBatch.step"):
        monkeypatch.setattr(name, refuse)
    carry_out(again)
    assert {path: path.stat().st_mtime_ns for path in (study.directory / "made").iterdir()} == before


def test_memories_that_are_not_needed_are_removed(study):
    held = sorted(path.name for path in (study.directory / "memories").iterdir() if path.is_dir())
    assert len(held) == 1 + 2 + 2, held  # of questions; of harm and forgetting; beside LoRA and RAG
    assert not list((study.directory / "lora").rglob("merged*"))
    assert not list((study.directory / "lora").rglob("checkpoint*"))


def test_lora_goes_on_from_its_checkpoint(study, monkeypatch):
    from proof import lora
    from proof.curves import DomainTexts

    texts = DomainTexts.of(study, "footballers")
    attached, _ = texts.attach(study, SIZES.core, 0)
    train, dev = attached.corpus.split("train"), attached.corpus.split("dev")
    settings, out = lora.LoraSettings(2, 1e-3), study.directory / "stopped"
    monkeypatch.setattr(lora, "_BETWEEN_CHECKPOINTS", 0.0)
    step, steps = lora.LoraTraining.step, []

    def stopping(training, inputs, targets):
        if len(steps) == 3:
            raise KeyboardInterrupt
        steps.append(training.spent.core_seconds)
        step(training, inputs, targets)

    given = {"settings": settings, "budget": 1.0, "out": out}
    with monkeypatch.context() as stopped:
        stopped.setattr(lora.LoraTraining, "step", stopping)
        with pytest.raises(KeyboardInterrupt):
            lora.train_lora(study.model, train, dev, **given)
    assert (out / "checkpoint.pt").exists()
    continued = lora.LoraTraining(study.model, settings, 1.0)
    continued.load(out / "checkpoint.pt")
    assert continued.steps == 3
    assert continued.spent.core_seconds > steps[-1]
    run = lora.train_lora(study.model, train, dev, **given)
    assert run.steps > 3
    assert run.core_seconds >= 1.0
    assert run.curve[0][0] == 0
    assert not (out / "checkpoint.pt").exists()
    merged = lora.merge_lora(study.model, {"settings": run.settings, "adapter": run.adapter}, out / "merged")
    assert (merged / "model.safetensors").exists()
