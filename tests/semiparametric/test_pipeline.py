"""A run whose text holds facts that only a memory can know: learned through it, lost without it, and never leaked."""

import json

import numpy as np
import pytest

from spalm.learning import Hardware
from spalm.recipe import ROWS, Recipe, Run
from spalm.semiparametric import Retriever, mixtures

NAMES = [f"{kind}{number}" for kind in ("ka", "lo", "mi", "nu") for number in range(30)]
FACTS = 600


def text(random: np.random.Generator, facts: np.ndarray, count: int) -> str:
    """Lines of three names: the third is a matter of the first two, but of neither alone."""
    return "".join(
        " ".join(NAMES[name] for name in facts[row]) + " .\n" for row in random.integers(0, len(facts), count)
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("facts")
    random = np.random.default_rng(0)
    facts = random.integers(0, len(NAMES), (FACTS, 3))
    for name, documents in (("train", 24), ("valid", 3), ("test", 3)):
        lines = [{"id": f"{name}-{i}", "text": text(random, facts, 150)} for i in range(documents)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = Recipe.parse(
        {
            "title": "facts",
            "corpus": {"source": {"kind": "text", "path": str(folder)}, "tokeniser": {"kind": "words"}},
            "network": {"layers": 2, "width": 32, "heads": 2, "head_width": 16, "feed_forward": 48},
            "training": {
                "steps": 300,
                "batch_size": 8,
                "segment_length": 32,
                "memory_length": 16,
                "optimiser": {"learning_rate": 0.01, "warm_up": 20, "clip": 1.0},
                "evaluate_every": 100,
                "seed": 1,
            },
            "neighbours": {"document": True, "held_out": 16},
            "spalm": {"start": 0.4, "gate": {"bias": 0.0}},
            "adaptive": {"passes": 4, "batch_size": 256, "width": 16},
            "evaluation": {"unit": "perplexity/token"},
        },
        "test",
    )
    return Run(recipe, tmp_path_factory.mktemp("run"), Hardware("cpu", 1))


@pytest.fixture(scope="module")
def rows(run) -> dict[str, dict]:
    return {name: run.rows(name)[0] for name in ROWS}


def test_what_only_the_memory_knows_is_learned_through_it_and_lost_without(rows):
    parametric = rows["transformer-xl"]["test"]
    for name in ("spalm", "spalm+knn", "spalm-adaptive", "knn-lm"):
        assert rows[name]["test"] < 0.8 * parametric, name
        assert rows[name]["p_against_transformer_xl"] < 1e-3
    ablated = rows["spalm"]["without_long_term_memory"]["test"]
    assert ablated > 1.2 * rows["spalm"]["test"]
    assert rows["knn-lm"]["without_long_term_memory"]["test"] == pytest.approx(parametric)
    assert rows["transformer-xl"]["p_against_transformer_xl"] is None


def test_spalm_makes_the_steps_that_transformer_xl_has_left(run, rows):
    assert rows["spalm"]["steps"] == rows["transformer-xl"]["steps"] == 300
    trained = run.model("spalm")
    first = min(int(line.split('"step": ')[1].split(",")[0]) for line in _metrics(trained))
    assert first == 130  # logged every ten steps, from 120 on
    assert trained.manifest["parents"]["start"] == run.model("transformer-xl").digest


def _metrics(trained) -> list[str]:
    return (trained.directory / "metrics.jsonl").read_text().splitlines()


def test_no_dev_or_test_position_is_in_the_memory(run):
    train = run.corpus.split("train")
    entries = run.memory.entries()
    assert len(entries) == len(train)
    np.testing.assert_array_equal(entries.tokens(0, len(train)), train.tokens)
    names = set(entries.documents_held.names)
    assert names == set(train.names)
    assert not names & {*run.corpus.split("dev").names, *run.corpus.split("test").names}


def test_training_positions_retrieve_from_other_documents_only(run):
    train = run.corpus.split("train")
    ids, _ = run.neighbours.read("train", np.arange(len(train)))
    own = np.searchsorted(train.ends, np.arange(len(train)), side="right")
    theirs = np.searchsorted(train.ends, ids, side="right")
    assert (theirs != own[:, None])[ids >= 0].all()
    tokens = Retriever(run.neighbours, "train", 4)(np.arange(len(train))).tokens.numpy()
    np.testing.assert_array_equal(tokens[ids >= 0], train.tokens[ids[ids >= 0]])


def test_what_the_adaptive_mixture_learned_from_is_not_what_it_is_scored_on(run, rows):
    """The first half of dev is scored by a mixture that learned from the second."""
    dev = run.corpus.split("dev")
    halves = mixtures._halves(dev)
    assert len(halves[0]) in dev.ends.tolist()
    records = run.records("spalm", 16)
    retriever = Retriever(run.neighbours, "dev", 16)
    settings = run.recipe.adaptive
    learned = mixtures.learn_mixture(settings, records.lesson(dev, retriever, halves[1]))
    part = records.lesson(dev, retriever, halves[0])
    expected = learned.target_log_probabilities(part.log_base, part.said, part.retrieved, part.targets)
    kept = run.records("spalm-adaptive", 16).log_probabilities("dev")[: len(halves[0])]
    np.testing.assert_allclose(kept, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert rows["spalm-adaptive"]["dev"] > 1
