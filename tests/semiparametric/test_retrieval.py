"""Neighbours advanced by a token, against a loop by hand."""

import shutil

import numpy as np
import pytest
import torch

from spalm.memory import Memory
from spalm.neighbours import MISSING
from spalm.semiparametric import Retrieved, advance_neighbours


@pytest.fixture
def memory(facts_run, tmp_path) -> Memory:
    """A copy from which some documents are forgotten, one of them between two that are not."""
    memory = Memory(shutil.copytree(facts_run.memory.directory, tmp_path / "memory"))
    names = memory.entries().live_documents.names
    memory.forget([names[3], names[10]])
    return memory


def by_hand(before: Retrieved, came: list[int], memory: Memory) -> list[list[tuple[int, float, int]]]:
    entries = memory.entries()
    alive = dict(zip(entries.labels(0, len(entries)).tolist(), entries.tokens(0, len(entries)).tolist()))
    documents = dict(zip(alive, entries.documents(0, len(entries)).tolist()))
    found = []
    for row, token in enumerate(came):
        moved = [
            (id + 1, distance, alive[id + 1])
            for id, distance, proposed in zip(
                before.ids[row].tolist(), before.distances[row].tolist(), before.tokens[row]
            )
            if id in alive and proposed == token and documents.get(id + 1) == documents[id]
        ]
        found.append(sorted(moved, key=lambda each: each[1]))
    return found


def test_neighbours_that_were_right_move_on(memory):
    entries, random = memory.entries(), np.random.default_rng(0)
    held = entries.live_documents
    ends = held.first_ids + held.entries - 1  # nothing follows the last entries of documents
    ids = random.choice(entries.labels(0, len(entries)), (7, 41), replace=True)
    ids[:, :5] = random.choice(ends, (7, 5))
    ids[:, 5] = MISSING
    distances = random.random((7, 41)).astype(np.float32)
    distances[:, 5] = np.inf
    before = Retrieved.from_ids(ids, distances, entries)
    came = before.tokens[torch.arange(7), torch.tensor([0, 6, 7, 8, 9, 10, 11])]
    moved = advance_neighbours(before, came, entries)
    for row, expected in enumerate(by_hand(before, came.tolist(), memory)):
        count = int(moved.present[row].sum())
        found = zip(moved.ids[row, :count].tolist(), moved.distances[row, :count].tolist(), moved.tokens[row].tolist())
        assert list(found) == expected
        assert (moved.ids[row, count:] == MISSING).all()
    assert moved.present.any()


def test_what_was_forgotten_meanwhile_does_not_move_on(memory):
    entries = memory.entries()
    held = entries.live_documents
    ids = held.first_ids[None, :6] + np.arange(4)[:, None]
    before = Retrieved.from_ids(ids, np.ones(ids.shape, np.float32), entries)
    memory.forget([held.names[1], held.names[4]])
    moved = advance_neighbours(before, before.tokens[:, 1], memory.entries())
    gone = {int(held.first_ids[which]) + offset for which in (1, 4) for offset in range(6)}
    assert not gone & set(moved.ids.flatten().tolist())
    for row, expected in enumerate(by_hand(before, before.tokens[:, 1].tolist(), memory)):
        assert sorted(id for id in moved.ids[row].tolist() if id != MISSING) == sorted(id for id, _, _ in expected)


def test_nothing_stays_nothing(memory):
    moved = advance_neighbours(Retrieved.empty(3), torch.tensor([1, 2, 3]), memory.entries())
    assert moved.ids.shape == (3, 0)
