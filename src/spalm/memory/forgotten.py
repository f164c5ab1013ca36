"""Forgotten text: documents that are marked but not compacted yet, and parts of a text that are no longer alive."""

import json
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from spalm.artifact import only_writer
from spalm.memory.catalogue import drop_unfinished_batch
from spalm.memory.entries import Entries
from spalm.memory.memory import Memory


def forgotten_entries(memory: Memory) -> Entries:
    """Returns the entries of the documents that are forgotten and whose bytes are still there."""
    with memory.catalogue.read() as connection:
        return memory.load_entries(connection, "forgotten IS NOT NULL")


def forgotten_documents(
    memory: Memory, source: dict[str, Any], begins: Int[np.ndarray, "documents"]
) -> Bool[np.ndarray, "documents"]:
    """Returns which documents of a text were remembered from `source` and are not alive any more.

    `begins` are the positions at which the documents of the text begin. What was never remembered is not forgotten.
    """
    query = "SELECT first_id FROM batches WHERE source = ? AND finished"
    with memory.catalogue.read() as connection:
        batches = connection.execute(query, [json.dumps(source, sort_keys=True)]).fetchall()
    if not batches:
        return np.zeros(len(begins), bool)
    entries = memory.entries()
    alive = [entries.rows(first + begins) >= 0 for (first,) in batches]
    return ~np.any(alive, axis=0)


def has_unfinished(memory: Memory) -> bool:
    """Returns whether an interrupted `remember` left a part of its text."""
    with memory.catalogue.read() as connection:
        return connection.execute("SELECT 1 FROM batches WHERE NOT finished").fetchone() is not None


def drop_unfinished(memory: Memory) -> bool:
    """Drops what an interrupted `remember` has written of its text; returns whether there was any."""
    if not has_unfinished(memory):
        return False
    with only_writer(memory.directory):
        with memory.catalogue.change() as connection:
            drop_unfinished_batch(connection)
        memory.clear_leftovers()
    return True


def is_source(memory: Memory, corpus: str) -> bool:
    """Returns whether any text was remembered from the corpus with this digest."""
    with memory.catalogue.read() as connection:
        query = "SELECT count(*) FROM batches WHERE finished AND instr(source, ?)"
        return connection.execute(query, [json.dumps(corpus)]).fetchone()[0] > 0
