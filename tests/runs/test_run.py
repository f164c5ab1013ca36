"""A run whose text holds facts that only a memory can know: learned through it, lost without it, and never leaked."""

import numpy as np
import pytest
import torch

from spalm.corpus import TrainingBatches
from spalm.runs import ROWS, mixtures
from spalm.semiparametric import Retriever, SpalmSettings
from spalm.semiparametric.training import spalm_segment_loss


@pytest.fixture(scope="module")
def run(facts_run):
    return facts_run


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
    trained = run.network("spalm")
    first = min(int(line.split('"step": ')[1].split(",")[0]) for line in _metrics(trained))
    assert first == 130  # logged every ten steps, from 120 on
    assert trained.manifest["parents"]["start"] == run.network("transformer-xl").digest


def _metrics(trained) -> list[str]:
    return (trained.directory / "metrics.jsonl").read_text().splitlines()


def test_no_dev_or_test_position_is_in_the_memory(run):
    train = run.corpus.split("train")
    entries = run.memory.entries()
    assert len(entries) == len(train)
    np.testing.assert_array_equal(entries.tokens(0, len(train)), train.tokens)
    names = set(entries.live_documents.names)
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


@pytest.mark.usefixtures("rows")
def test_what_the_adaptive_mixture_learned_from_is_not_what_it_is_scored_on(run):
    """Each half of dev is scored by a mixture that learned from the other, test by one that learned from dev."""
    dev = run.corpus.split("dev")
    halves = [np.asarray(half) for half in mixtures._halves(dev)]
    assert len(halves[0]) in dev.ends.tolist()
    records = run.records("spalm", 16)
    kept = run.records("spalm-adaptive", 16)
    test = run.corpus.split("test")
    for learned_from, text, scored in (
        (halves[1], dev, halves[0]),
        (halves[0], dev, halves[1]),
        (np.arange(len(dev)), test, np.arange(len(test))),
    ):
        examples = records.examples(dev, Retriever(run.neighbours, "dev", 16), learned_from)
        mixture = mixtures.learn_mixture(run.recipe.adaptive, examples)
        part = records.examples(text, Retriever(run.neighbours, text.split, 16), scored)
        expected = mixture.target_log_probabilities(part)
        found = kept.log_probabilities(text.split)[scored]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("start", [0.0, 0.001, 0.999])
def test_only_a_start_of_nothing_is_from_scratch_and_some_steps_are_its_own(start):
    first = SpalmSettings(start=start).first_step(24)
    assert (first == 0) == (start == 0)
    assert first < 24


@pytest.mark.slow
def test_in_half_precision_and_compiled_it_is_nearly_the_same(run):
    spalm = run.network("spalm").load(torch.device("cpu"))
    batch = TrainingBatches(run.corpus.split("train"), 4, 16, seed=1).batch(3)
    retriever = Retriever(run.neighbours, "train", 4)
    plain, _ = spalm_segment_loss(spalm, retriever, 16, batch=batch, memory=[])
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = spalm_segment_loss(spalm, retriever, 16, batch=batch, memory=[])
    assert float(half) == pytest.approx(float(plain), rel=0.02)
    look = torch.compiler.disable(retriever.__call__)
    compiled = torch.compile(
        lambda batch: spalm_segment_loss(spalm, look, 16, batch=batch, memory=[])[0], backend="eager"
    )
    assert float(compiled(batch)) == pytest.approx(float(plain), rel=1e-5)
