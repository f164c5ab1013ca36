"""The overlap of dev and test with the memory, against a naive search."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from rich.console import Console

from spalm.corpus import Corpus
from spalm.errors import InputError
from spalm.memory import Memory, encoder_of, remember, source_of_split
from spalm.runs import FinishedRun
from spalm.study import ANALYSES, AnalysisRequest, analyse_attached
from spalm.study.analyses.overlap import match_lengths


def naive_match(documents: list[list[int]], context: list[int]) -> int:
    """The length of the longest end of a context that stands in a document, with a token after it."""
    longest = 0
    for text in documents:
        for end in range(len(text)):
            length = 0
            while length < min(end, len(context)) and text[end - 1 - length] == context[-1 - length]:
                length += 1
            longest = max(longest, length)
    return longest


def test_overlap_is_that_of_a_naive_search(on_test, finished, text, log_probabilities, monkeypatch):
    train = finished.corpus.split("train")
    monkeypatch.setattr("spalm.study.analyses.overlap._POSITIONS", 700)
    documents = [train.tokens[begin:end].tolist() for begin, end in zip(train.begins, train.ends)]
    lengths = match_lengths(finished.corpus, finished.memory, "test")
    assert len(lengths) == len(text)
    rows = np.random.default_rng(0).choice(len(text), 6, replace=False)
    for position in [*rows.tolist(), *text.begins.tolist()]:
        begin = int(text.begins[text.documents_of(np.array(position))])
        assert lengths[position] == naive_match(documents, text.tokens[begin:position].tolist()), position
    found = ANALYSES["overlap"](on_test)
    names = ["0", "1", "2 to 3", "4 to 7", "8 to 15", "16 to 31", "32 or more"]
    lows = [0, 1, 2, 4, 8, 16, 32, np.inf]
    masks = [(lengths >= low) & (lengths < high) for low, high in pairwise(lows)]
    shares = found.tables["lengths"].rows
    assert [row[0] for row in shares] == names
    assert [row[2] for row in shares] == pytest.approx([mask.mean() for mask in masks])
    models = found.tables["gains"].columns[2:]
    assert models == [model for model in finished.rows if model != "transformer-xl"]
    for number, model in enumerate(models):
        gain = np.array(log_probabilities[model]) - np.array(log_probabilities["transformer-xl"])
        for mask, row, part in zip(masks, found.tables["gains"].rows, found.tables["parts"].rows):
            assert row[1] == mask.sum()
            assert row[2 + number] == (pytest.approx(gain[mask].mean(), abs=1e-6) if mask.any() else None)
            assert part[1 + number] == pytest.approx(gain[mask].sum() / len(gain), abs=1e-6)
        assert found.tables["gains"].rows[-1][2 + number] == pytest.approx(gain.mean(), abs=1e-6)
        assert found.tables["parts"].rows[-1][1 + number] == pytest.approx(gain.mean(), abs=1e-6)
    spans = [row[2] for row in found.tables["spans"].rows]
    assert spans == sorted(spans, reverse=True)
    assert 0 < spans[0] < 1
    line = found.picture().axes[0].get_lines()[0]
    assert list(line.get_ydata()) == [row[2] for row in found.tables["gains"].rows[:-1] if row[1]]


def test_a_split_that_was_remembered_does_not_match_itself(finished, tmp_path):
    """Only its own document is left out, so what it quotes of others is still found."""
    folder = shutil.copytree(finished.directory, tmp_path / "run")
    before = match_lengths(finished.corpus, finished.memory, "dev")
    run = FinishedRun(folder)
    encoder = encoder_of(run.network("transformer"), run.recipe.memory, lambda: torch.device("cpu"))
    remember(run.memory, encoder, run.corpus.split("dev"), source=source_of_split(run.corpus, "dev"))
    again = FinishedRun(folder)
    after = match_lengths(again.corpus, again.memory, "dev")
    assert (after >= before).all()
    assert after.max() < 64
    rows = ANALYSES["overlap"](AnalysisRequest(FinishedRun(folder), "dev")).tables["spans"].rows
    assert rows[-1][1] < 1


def test_overlap_of_an_attached_model_is_that_of_a_naive_search(attached_folder, tmp_path):
    analyse_attached(attached_folder, ["overlap"], tmp_path, console=Console(quiet=True))
    tables = json.loads((tmp_path / "overlap.json").read_text())["tables"]
    memory, corpus = Memory(attached_folder / "memory"), Corpus(attached_folder / "corpus")
    entries, text = memory.entries(), corpus.split("test")
    own = memory.first_id(source_of_split(corpus, "test"))
    assert own is not None
    live = entries.live_documents
    documents = {
        int(first): entries.tokens_of(np.arange(first, first + count)).tolist()
        for first, count in zip(live.first_ids, live.entries)
    }
    lengths = []
    for begin, end in zip(text.begins.tolist(), text.ends.tolist()):
        others = [tokens for first, tokens in documents.items() if first != own + begin]
        lengths += [naive_match(others, text.tokens[begin:at].tolist()) for at in range(begin, min(end, begin + 3))]
    positions = [at for begin, end in zip(text.begins, text.ends) for at in range(begin, min(end, begin + 3))]
    found = match_lengths(corpus, memory, "test")
    assert found[positions].tolist() == lengths
    assert tables["lengths"]["rows"][0][2] == pytest.approx((found == 0).mean())
    assert sum(row[2] for row in tables["lengths"]["rows"]) == pytest.approx(1)
    assert (tmp_path / "overlap.png").is_file()
    with pytest.raises(InputError, match="only overlap can be analysed, not gates"):
        analyse_attached(attached_folder, ["gates"], tmp_path, console=Console(quiet=True))
