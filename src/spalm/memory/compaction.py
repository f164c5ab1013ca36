"""Compaction of a memory: shards that are small or hold forgotten entries are replaced by full ones of live entries."""

import numpy as np
from jaxtyping import Int

from spalm.memory.catalogue import Catalogue, record_version
from spalm.memory.entries import Entries
from spalm.memory.shards import Shards
from spalm.memory.verification import verify_shard

Run = list[int]
"""Consecutive entries: first id, number of entries, shard, and row in the shard."""


def rewrite_shards(catalogue: Catalogue, shards: Shards, entries: Entries) -> None:
    """Moves live entries from shards that are worth rewriting to new ones; drops forgotten documents and old shards.

    The files of the old shards stay until `Shards.remove_all_but`.
    """
    old = _worth_rewriting(catalogue, shards, entries)
    written, extents, verified = [], [], set[int]()
    for group in _groups(entries.runs[np.isin(entries.runs[:, 2], old)], shards.entries_per_shard):
        for number in {number for _, _, number, _ in group} - verified:
            verify_shard(catalogue, shards, number)
            verified.add(number)
        shard = catalogue.next_shard() + len(written)
        keys = np.concatenate([shards.read("keys", number, row, count) for _, count, number, row in group])
        tokens = np.concatenate([shards.read("tokens", number, row, count) for _, count, number, row in group])
        written.append((shard, len(keys), *shards.write(shard, keys, tokens)))
        rows = np.cumsum([0] + [count for _, count, _, _ in group])
        extents += [(shard, int(row), first, count) for row, (first, count, _, _) in zip(rows, group)]
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


def _worth_rewriting(catalogue: Catalogue, shards: Shards, entries: Entries) -> list[int]:
    """Returns the shards with forgotten entries and, if there are several small shards, those too."""
    alive = {int(shard): 0 for shard in entries.runs[:, 2]}
    for _, count, shard, _ in entries.runs.tolist():
        alive[shard] += count
    with catalogue.read() as connection:
        sizes = dict(connection.execute("SELECT id, entries FROM shards WHERE batch IS NULL"))
    partly_dead = {shard for shard, size in sizes.items() if alive.get(shard, 0) < size}
    small = {shard for shard, size in sizes.items() if 2 * size < shards.entries_per_shard}
    return sorted(partly_dead | small if len(small) > 1 else partly_dead)


def _groups(runs: Int[np.ndarray, "runs 4"], size: int) -> list[list[Run]]:
    """Returns the runs in groups of at most `size` entries; long runs are cut."""
    groups: list[list[Run]] = []
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
