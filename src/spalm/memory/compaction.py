"""Compaction of a memory: shards that are small or hold forgotten entries are replaced by full ones of live entries."""

import numpy as np
from jaxtyping import Int

from spalm.memory.catalogue import Catalogue, record_version
from spalm.memory.entries import Entries
from spalm.memory.shards import NO_KEYS, Column, Shards
from spalm.memory.verification import verify_shard

_Run = list[int]
"""Consecutive entries: first id, number of entries, shard, and row in the shard."""


def rewrite_shards(catalogue: Catalogue, shards: Shards, entries: Entries) -> None:
    """Moves live entries from shards that are worth rewriting to new ones; drops forgotten documents and old shards.

    The files of the old shards stay until `Shards.remove_all_but`. Entries with and without keys stay apart.
    """
    old, written, extents = [], [], []
    for column in ("keys", "tokens"):
        replaced = _worth_rewriting(catalogue, shards, entries, column=column)
        for group in _groups(entries.runs[np.isin(entries.runs[:, 2], replaced)], shards.full_size(column)):
            for number in {number for _, _, number, _ in group}:
                verify_shard(catalogue, shards, number)
            shard = catalogue.next_shard() + len(written)
            keys = _read_group(shards, "keys", group) if column == "keys" else None
            tokens = _read_group(shards, "tokens", group)
            written.append((shard, len(tokens), *shards.write(shard, keys, tokens)))
            rows = np.cumsum([0] + [count for _, count, _, _ in group])
            extents += [(shard, int(row), first, count) for row, (first, count, _, _) in zip(rows, group)]
        old += replaced
    with catalogue.change() as connection:
        forgotten = connection.execute("SELECT count(*) FROM documents WHERE forgotten IS NOT NULL").fetchone()[0]
        if old or forgotten:
            record_version(connection, f"compacted {len(old)} shard(s) into {len(written)}")
        connection.executemany("DELETE FROM extents WHERE shard = ?", [(shard,) for shard in old])
        connection.executemany("DELETE FROM shards WHERE id = ?", [(shard,) for shard in old])
        connection.execute("DELETE FROM documents WHERE forgotten IS NOT NULL")
        connection.executemany(
            "INSERT INTO shards (id, entries, keys_sha256, tokens_sha256) VALUES (?, ?, ?, ?)", written
        )
        connection.executemany("INSERT INTO extents VALUES (?, ?, ?, ?)", extents)


def _read_group(shards: Shards, column: Column, group: list[_Run]) -> np.ndarray:
    """Returns a column of the entries of some runs."""
    return np.concatenate([shards.read(column, number, row, count=count) for _, count, number, row in group])


def _worth_rewriting(catalogue: Catalogue, shards: Shards, entries: Entries, *, column: Column) -> list[int]:
    """Returns the shards with forgotten entries and, if there are several small shards, those too.

    Only shards whose largest file is that of `column` are considered: "keys", or "tokens" where there are no keys.
    """
    alive = {int(shard): 0 for shard in entries.runs[:, 2]}
    for _, count, shard, _ in entries.runs.tolist():
        alive[shard] += count
    with catalogue.read() as connection:
        sizes = dict(
            connection.execute(
                "SELECT id, entries FROM shards WHERE batch IS NULL AND (keys_sha256 = ?) = ?",
                [NO_KEYS, column == "tokens"],
            )
        )
    partly_dead = {shard for shard, size in sizes.items() if alive.get(shard, 0) < size}
    small = {shard for shard, size in sizes.items() if 2 * size < shards.full_size(column)}
    return sorted(partly_dead | small if len(small) > 1 else partly_dead)


def _groups(runs: Int[np.ndarray, "runs 4"], size: int) -> list[list[_Run]]:
    """Returns the runs in groups of at most `size` entries; long runs are cut."""
    groups: list[list[_Run]] = []
    room = 0
    for first, count, shard, row in runs.tolist():
        while count:
            if not room:
                groups.append([])
                room = size
            taken = min(room, count)
            groups[-1].append([first, taken, shard, row])
            first, count, row, room = first + taken, count - taken, row + taken, room - taken
    return groups
