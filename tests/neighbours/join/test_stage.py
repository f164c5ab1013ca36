"""The stage: a table for every split, killed and resumed, kept honest after something is forgotten."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import torch

from spalm.compute import Execution, LocalEngine
from spalm.errors import InputError
from spalm.lm import NetworkSettings, Reading, Transformer
from spalm.memory import Encoder, MemorySettings, open_memory, remember, source_of_split
from spalm.neighbours import (
    MISSING,
    Exclusion,
    NeighbourSettings,
    NeighbourTable,
    RamBudget,
    exact_search,
    find_neighbours,
    serial_map,
)
from spalm.neighbours.exclusion import NOT_AN_ENTRY, QueryExclusion
from spalm.neighbours.scratch_files import check_disk_space
from support.commands import PATIENCE, SMALL_SETTINGS, Fork, begun

EXECUTION = Execution(cluster=LocalEngine(2), ram=2 << 30)


@pytest.fixture
def encoder(corpus):
    settings = NetworkSettings(layers=1, width=14, heads=2, head_width=5, feed_forward=11)
    model = Transformer(settings, corpus.vocabulary).initialise(1).eval()
    reading = Reading.of(1, segment=8, memory=0, lanes=4, stride=4)
    return Encoder("d", 14, corpus.vocabulary, reading, lambda: model, lambda: torch.device("cpu"))


@pytest.fixture
def memory(corpus, encoder, tmp_path):
    made = open_memory(tmp_path / "memory", encoder, MemorySettings(), stream=corpus.split("train"))
    remember(made, encoder, corpus.split("train"), source=source_of_split(corpus, "train"))
    return made


def test_every_position_of_every_split_has_its_neighbours(memory, encoder, corpus, tmp_path):
    settings = NeighbourSettings(count=3, held_out=5, recall=0.9)
    table = find_neighbours(
        memory, encoder, corpus, settings=settings, directory=tmp_path / "neighbours", execution=EXECUTION
    )
    entries = memory.entries()
    for split in ("train", "dev", "test"):
        text = corpus.split(split)
        ids, distances = table.read(split, np.arange(len(text)))
        count = 3 if split == "train" else 5
        assert ids.shape == distances.shape == (len(text), count)
        queries = encoder.keys(text, 0, len(text), to_keys=memory.keys_of, width=memory.width).astype(np.float32)
        own = np.arange(len(text)) if split == "train" else np.full(len(text), NOT_AN_ENTRY)
        _, true = exact_search(
            queries, entries, count, parallel=serial_map, exclusion=QueryExclusion(own, own, Exclusion())
        )
        near_enough = distances <= true[:, -1:] * 1.001 + 1e-3
        assert near_enough.mean() > 0.9
        assert abs(near_enough.mean() - table.recall(split)) < 0.05
        direct = ((entries.take(entries.rows(ids)).astype(np.float32) - queries[:, None]) ** 2).sum(2)
        np.testing.assert_allclose(distances, direct, rtol=1e-3, atol=1e-3)
    ids, _ = table.read("train", np.arange(len(corpus.split("train"))))
    assert (ids != np.arange(len(ids))[:, None]).all()
    matches = (entries.take_tokens(ids[:, 0]) == corpus.split("train").tokens).mean()
    assert table.facts["splits"]["train"]["first_match"] == pytest.approx(matches)


@pytest.mark.slow
def test_what_is_forgotten_leaves_the_table_at_once(memory, encoder, corpus, tmp_path):
    table = find_neighbours(
        memory,
        encoder,
        corpus,
        settings=NeighbourSettings(count=3, held_out=5),
        directory=tmp_path / "neighbours",
        execution=EXECUTION,
    )
    everyone = np.arange(len(corpus.split("dev")))
    held = memory.entries().live_documents
    gone = set(range(int(held.first_ids[0]), int(held.first_ids[0] + held.entries[0])))
    before, _ = table.read("dev", everyone)
    assert gone & set(before.ravel().tolist())
    memory.forget([held.names[0]])
    ids, distances = table.read("dev", everyone)
    assert not gone & set(ids.ravel().tolist())
    assert np.isinf(distances[ids == MISSING]).all()
    assert (np.diff(distances[np.isfinite(distances).all(1)], axis=1) >= 0).all()
    again = find_neighbours(
        memory,
        encoder,
        corpus,
        settings=NeighbourSettings(count=3, held_out=5),
        directory=tmp_path / "neighbours",
        execution=EXECUTION,
    )
    ids, _ = again.read("dev", everyone)
    assert (ids != MISSING).all()
    assert not gone & set(ids.ravel().tolist())
    train, _ = again.read("train", np.arange(len(corpus.split("train"))))
    assert (train[sorted(gone)] == MISSING).all(), "what is not in the memory has no key to ask with"


@pytest.mark.slow
def test_a_table_of_another_memory_is_refused(memory, encoder, corpus, tmp_path):
    find_neighbours(
        memory, encoder, corpus, settings=NeighbourSettings(), directory=tmp_path / "neighbours", execution=EXECUTION
    )
    other = Encoder("other", 14, corpus.vocabulary, encoder.reading, encoder.load, encoder.device)
    with pytest.raises(InputError, match="keys of another kind"):
        find_neighbours(
            memory, other, corpus, settings=NeighbourSettings(), directory=tmp_path / "again", execution=EXECUTION
        )
    second = open_memory(tmp_path / "second", other, MemorySettings(), stream=corpus.split("train"))
    with pytest.raises(InputError, match="made with another memory"):
        NeighbourTable(tmp_path / "neighbours", second)


@pytest.mark.slow
def test_a_memory_made_anew_is_another_memory(memory, encoder, corpus, tmp_path):
    """The same encoder, but other texts under the same ids."""
    find_neighbours(
        memory, encoder, corpus, settings=NeighbourSettings(), directory=tmp_path / "neighbours", execution=EXECUTION
    )
    NeighbourTable(tmp_path / "neighbours", memory)
    other = open_memory(tmp_path / "other", encoder, MemorySettings(), stream=corpus.split("test"))
    remember(other, encoder, corpus.split("test"), source=source_of_split(corpus, "test"))
    with pytest.raises(InputError, match="made with another memory"):
        NeighbourTable(tmp_path / "neighbours", other)


def test_an_empty_memory_is_told(encoder, corpus, tmp_path):
    empty = open_memory(tmp_path / "empty", encoder, MemorySettings(), stream=corpus.split("train"))
    with pytest.raises(InputError, match="holds no keys"):
        find_neighbours(
            empty, encoder, corpus, settings=NeighbourSettings(), directory=tmp_path / "neighbours", execution=EXECUTION
        )


def test_too_little_memory_or_disk_is_told(tmp_path):
    with pytest.raises(InputError, match=r"--ram 600M is too little for 2 worker\(s\); give at least 1024M"):
        RamBudget(600 << 20, 2)
    with pytest.raises(InputError, match="GB free, the table needs up to"):
        check_disk_space(tmp_path, 1 << 60, "the table")


def run(verb: str, out, text_folder, *more: str) -> Fork:
    return begun(verb, *SMALL_SETTINGS, f"corpus.source.path={text_folder}", "--out", out, "--threads", 1, *more)


@pytest.mark.slow
def test_killed_at_random_points_it_ends_with_the_same_bytes(text_folder, tmp_path):
    """`remember` and `neighbours` as a user runs them, killed for good at random moments, then run again."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    assert run("neighbours", whole, text_folder, "--ram", "1G").wait() == 0
    length = time.monotonic() - began
    shutil.copytree(whole, killed, ignore=shutil.ignore_patterns("memory", "neighbours"))
    chance = random.Random(5)
    for attempt in range(40):
        process = run("neighbours", killed, text_folder, "--ram", "1G")
        done = killed / "neighbours" / "work" / "train.done.json"
        while attempt == 6 and process.poll() is None and not done.exists():
            time.sleep(0.005)  # this time, die with workers at work
        if attempt == 6:
            os.kill(process.pid, signal.SIGKILL)
        try:
            process.wait(chance.uniform(0.35, 1.0) * length if attempt < 6 else PATIENCE)
            if process.returncode == -signal.SIGKILL:
                continue
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            continue
        assert process.returncode == 0, process.errors()
        break
    for name in ("train.ids", "train.distances", "dev.ids", "test.distances"):
        assert (killed / "neighbours" / name).read_bytes() == (whole / "neighbours" / name).read_bytes()
    one, other = (json.loads((folder / "neighbours" / "manifest.json").read_text()) for folder in (whole, killed))
    assert one == other
    assert not (killed / "neighbours" / "work").exists()
