"""Figures by hand, and evaluations that are kept, resumed and never mixed up."""

import math

import numpy as np
import pytest

from spalm.compute import Execution
from spalm.corpus import CorpusSettings, build_corpus
from spalm.errors import InputError
from spalm.lm import ModelSettings, train_model
from spalm.runs import Evaluation, EvaluationSettings, evaluate_model, in_all_units, records
from support.small_texts import word_corpus

MODEL = ModelSettings.parse(
    {
        "network": {"layers": 2, "width": 16, "heads": 2, "head_width": 8, "feed_forward": 32},
        "training": {
            "steps": 10,
            "batch_size": 4,
            "segment_length": 8,
            "memory_length": 8,
            "optimiser": {"learning_rate": 0.01},
            "evaluate_every": 10,
        },
    },
    "test",
)


@pytest.fixture
def trained(corpus, tmp_path):
    return train_model(MODEL, corpus, tmp_path / "model", execution=Execution())


def evaluated(trained, corpus, out, memory=8, **settings):
    evaluation = Evaluation(EvaluationSettings(unit="perplexity/word", **settings), memory)
    return evaluate_model(trained, corpus, evaluation, directory=out, execution=Execution())


def test_perplexity_per_word_of_a_subword_model_by_hand(tmp_path):
    """Two lines, five words and two line ends; the model spells them with as many subwords as it likes."""
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text("höher stieg er .\nimmer\n")
    corpus = build_corpus(
        CorpusSettings.parse(
            {
                "source": {"kind": "text", "path": str(tmp_path)},
                "tokeniser": {"kind": "bpe", "size": 260, "mark_documents": False},
            },
            "test",
        ),
        tmp_path / "corpus",
    )
    split = corpus.split("test")
    assert (split.words, split.characters) == (7, 23)
    assert len(split) > 15
    found = in_all_units(np.full(len(split), math.log(0.5), np.float32), split)
    assert found["perplexity/token"] == pytest.approx(2.0)
    assert found["perplexity/word"] == pytest.approx(2 ** (len(split) / 7))
    assert found["bits/character"] == pytest.approx(len(split) / 23)


def test_log_probabilities_are_kept_for_every_token(trained, corpus, tmp_path):
    found = evaluated(trained, corpus, tmp_path / "e")
    for name in ("dev", "test"):
        split, log_p = corpus.split(name), found.log_probabilities(name)
        assert log_p.shape == (len(split),)
        assert (log_p < 0).all()
        assert in_all_units(log_p, split)["perplexity/token"] == pytest.approx(math.exp(-log_p.astype(float).mean()))


@pytest.mark.slow
def test_lanes_and_blocks_do_not_change_the_in_all_units(trained, corpus, tmp_path, monkeypatch):
    one = evaluated(trained, corpus, tmp_path / "1", lanes=1)
    many = evaluated(trained, corpus, tmp_path / "2", lanes=7)
    monkeypatch.setattr(records, "_BLOCK_TOKENS", 50)
    blocks = evaluated(trained, corpus, tmp_path / "3", lanes=3)
    for other in (many, blocks):
        np.testing.assert_allclose(other.log_probabilities("test"), one.log_probabilities("test"), atol=1e-5)


@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_bytes(trained, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BLOCK_TOKENS", 50)
    whole = evaluated(trained, corpus, tmp_path / "whole", lanes=1)
    real, calls = records.score_positions, []

    def crash(*arguments, **named):
        calls.append(named["positions"].start)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(records, "score_positions", crash)
    with pytest.raises(KeyboardInterrupt):
        evaluated(trained, corpus, tmp_path / "killed", lanes=1)
    with (tmp_path / "killed" / "dev.log_probabilities").open("ab") as file:
        file.write(b"xyz")  # the half of a block
    calls.clear()
    calls.extend([0, 0, 0])
    resumed = evaluated(trained, corpus, tmp_path / "killed", lanes=1)
    assert calls[3] == 128  # two blocks of 64, four times the warm-up, were done
    assert resumed.manifest == whole.manifest


def test_another_memory_length_at_test(trained, corpus, tmp_path):
    short, long = (evaluated(trained, corpus, tmp_path / str(m), memory=m) for m in (0, 64))
    assert (short.log_probabilities("test") != long.log_probabilities("test")).mean() > 0.5


def test_another_corpus_is_refused(trained, text_folder, tmp_path):
    (text_folder / "story-1.txt").write_text("something else entirely .\n" * 9)
    other = word_corpus(text_folder, tmp_path / "other")
    with pytest.raises(InputError, match="trained on another corpus"):
        evaluated(trained, other, tmp_path / "e")


def test_a_stride_longer_than_the_window_is_refused(trained, corpus, tmp_path):
    with pytest.raises(InputError, match=r"evaluation.stride = 9: windows have 8"):
        evaluated(trained, corpus, tmp_path / "e", memory=0, stride=9)
