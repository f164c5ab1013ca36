"""Remembering: the entries of a stream of tokens are written shard by shard.

Their keys are computed by the encoder. Entries may also have no keys; then only exact matches find them.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spalm.artifact import only_writer, set_aside
from spalm.compute import Execution, JobPart, ProgressCallback, SentByFields, in_order, split_rows
from spalm.console import bar, say
from spalm.corpus import Corpus, Split, TokenStream
from spalm.errors import InputError
from spalm.files import is_leftover
from spalm.memory.catalogue import drop_unfinished_batch, record_version
from spalm.memory.encoder import Encoder, MemorySettings
from spalm.memory.memory import IDENTITY, PARTIAL_FILES, Memory
from spalm.memory.projection import Projection, to_half_precision
from spalm.settings import differences

_SAMPLE = 1 << 14
"""Number of positions from which a projection is learned."""


def source_of_split(corpus: Corpus, split: Split) -> dict[str, Any]:
    """Returns what identifies a split of a corpus in the catalogue of a memory."""
    return {"corpus": corpus.digest, "split": split}


def source_of_text(stream: TokenStream) -> dict[str, Any]:
    """Returns what identifies any other text in the catalogue of a memory: the digest of its tokens and names."""
    digest = hashlib.sha256(str(stream.tokens.dtype).encode())
    digest.update(np.ascontiguousarray(stream.tokens).data)
    digest.update(json.dumps([stream.names, stream.ends.tolist()]).encode())
    return {"text": digest.hexdigest()}


def open_memory(
    directory: Path, encoder: Encoder, settings: MemorySettings, *, stream: TokenStream, restart: bool = False
) -> Memory:
    """Returns the memory at `directory` for keys of this encoder; makes an empty one if there is none.

    A memory with keys of another kind is refused, or set aside with `restart`. If keys are to be reduced, the
    projection is learned from `stream`.
    """
    width = min(settings.key_width or encoder.width, encoder.width)
    identity = {**encoder.identity, "width": width}
    if (directory / IDENTITY).exists():
        memory = Memory(directory)
        changed = differences(memory.identity, identity)
        if not changed or not restart:
            memory.require_same_keys(identity)
            return memory
        set_aside(directory, changed)
    directory.mkdir(parents=True, exist_ok=True)
    with only_writer(directory):
        if (directory / IDENTITY).exists():  # made by another process in the meantime
            return open_memory(directory, encoder, settings, stream=stream)
        present = {path.name for path in directory.iterdir() if not is_leftover(path.name)}
        foreign = sorted(present - PARTIAL_FILES)
        if foreign:
            raise InputError(f"{directory} holds files that are not ours ({foreign[0]}); choose another directory")
        projection = _learn_projection(encoder, stream, width) if width < encoder.width else None
        return Memory.create(directory, identity, projection)


def _learn_projection(encoder: Encoder, stream: TokenStream, width: int) -> Projection:
    """Learns a projection from pieces of the stream, evenly spread."""
    stride = encoder.reading.stride
    piece = stride * -(-1024 // stride)
    pieces = max(1, min(_SAMPLE, len(stream)) // piece)
    starts = {int(start) // stride * stride for start in np.linspace(0, max(0, len(stream) - piece), pieces)}
    with bar("learn the keys' projection", len(starts)) as progress:
        sample = []
        for start in sorted(starts):
            stop = min(start + piece, len(stream))
            sample.append(encoder.keys(stream, start, stop, to_keys=to_half_precision, width=encoder.width))
            progress.advance()
    return Projection.learn(np.concatenate(sample), width)


def remember(
    memory: Memory,
    encoder: Encoder | None,
    stream: TokenStream,
    *,
    source: dict[str, Any],
    execution: Execution | None = None,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Adds the documents of `stream` to the memory; returns False if they, or some of them, are there already.

    Without an encoder the entries have no keys, and only exact matches find them. A killed run goes on after its last
    whole shard. The documents become visible together, when all are written.
    `check` is called every few windows; an exception that it raises ends the work.
    """
    execution = execution or Execution()
    engine, restart = execution.engine, execution.restart
    if encoder is not None:
        memory.require_same_keys({**encoder.identity, "width": memory.width})
    engine.refuse_unless_shared(memory.directory)
    with only_writer(memory.directory):
        memory.clear_leftovers()
        if memory.remembers(source):
            say(f"{memory.directory}: remembered before, unchanged")
            return False
        batch, first_id = _claim(memory, source, len(stream), restart=restart)
        done = _written(memory, batch)
        writer = _ShardWriter(memory, encoder, stream, memory.catalogue.next_shard())
        with bar(f"remember {len(stream.names):,} document(s)", len(stream), done) as shown:

            def progress(positions: int) -> None:
                shown.advance(positions)
                check()

            shards = split_rows(done, len(stream), writer.shard_size)
            # In order, because a resumed run goes on after the last shard.
            for part, digests in in_order(engine.run_parts(writer, shards, progress, threads=engine.threads)):
                _add_shard(memory, batch, first_id, part=part, shard=writer.shard(part), digests=digests)
                shown.say(f"{part.last:,} entries of width {memory.width}" if encoder else f"{part.last:,} entries")
        _publish(memory, batch, first_id, stream=stream)
    memory.exact.catch_up(execution)
    return True


def _claim(memory: Memory, source: dict[str, Any], entries: int, *, restart: bool) -> tuple[int, int]:
    """Returns the batch to be written and the id of its first entry: begun now, or by a run that was killed."""
    name = json.dumps(source, sort_keys=True)
    with memory.catalogue.change() as connection:
        row = connection.execute("SELECT id, first_id, source FROM batches WHERE NOT finished").fetchone()
        if row is not None and row[2] == name and not restart:
            return row[0], row[1]
        if row is not None:
            if not restart:
                raise InputError(
                    f"{memory.directory} is in the middle of remembering other text; finish that first, or give "
                    "--restart to drop what it has written"
                )
            drop_unfinished_batch(connection)
        first_id = connection.execute("SELECT coalesce(max(first_id + entries), 0) FROM batches").fetchone()[0]
        made = connection.execute(
            "INSERT INTO batches (source, first_id, entries) VALUES (?, ?, ?)", [name, first_id, entries]
        )
        return int(made.lastrowid or 0), first_id


def _written(memory: Memory, batch: int) -> int:
    """Returns the number of entries of a batch that are written already."""
    with memory.catalogue.read() as connection:
        return connection.execute("SELECT coalesce(sum(entries), 0) FROM shards WHERE batch = ?", [batch]).fetchone()[0]


@dataclass(frozen=True)
class _ShardWriter(SentByFields):
    """The job of encoding a text and writing a shard for each part. A shard counts once the catalogue names it."""

    memory: Memory
    encoder: Encoder | None
    """Reads the text to make keys; None: there are no keys."""
    stream: TokenStream
    first_shard: int
    """Number of the first part's shard."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that the encoder computes on."""
        return 0 if self.encoder is None else self.encoder.gpus

    @property
    def shard_size(self) -> int:
        """Number of entries of a shard: a multiple of the stride with which the encoder reads."""
        if self.encoder is None:
            return self.memory.shards.full_size("tokens")
        stride, full = self.encoder.reading.stride, self.memory.shards.full_size("keys")
        return stride * max(1, min(full, self.encoder.entries_per_shard or full) // stride)

    def shard(self, part: JobPart) -> int:
        """Returns the number of the shard that holds a part."""
        return self.first_shard + part.number

    def __call__(self, part: JobPart, progress: ProgressCallback) -> tuple[str, str]:
        """Writes the shard of a part and returns the digests of its files."""
        memory, (first, last) = self.memory, (part.first, part.last)
        tokens = self.stream.targets(np.arange(first, last))
        if self.encoder is None:
            progress(len(part))
            return memory.shards.write(self.shard(part), None, tokens)
        keys = self.encoder.keys(
            self.stream, first, last, to_keys=memory.keys_of, width=memory.width, progress=progress
        )
        return memory.shards.write(self.shard(part), keys, tokens)


def _add_shard(
    memory: Memory, batch: int, first_id: int, *, part: JobPart, shard: int, digests: tuple[str, str]
) -> None:
    """Adds a shard that was written to the catalogue."""
    with memory.catalogue.change() as connection:
        connection.execute("INSERT INTO shards VALUES (?, ?, ?, ?, ?)", [shard, batch, len(part), *digests])
        connection.execute("INSERT INTO extents VALUES (?, 0, ?, ?)", [shard, first_id + part.first, len(part)])


def _publish(memory: Memory, batch: int, first_id: int, *, stream: TokenStream) -> None:
    """Adds the documents of a batch to the catalogue, which makes them visible."""
    rows = [
        (batch, name, first_id + int(begin), int(end - begin))
        for name, begin, end in zip(stream.names, stream.begins, stream.ends)
    ]
    with memory.catalogue.change() as connection:
        record_version(connection, f"remembered {len(rows)} document(s), {len(stream):,} entries")
        connection.executemany("INSERT INTO documents (batch, name, first_id, entries) VALUES (?, ?, ?, ?)", rows)
        connection.execute("UPDATE shards SET batch = NULL WHERE batch = ?", [batch])
        connection.execute("UPDATE batches SET finished = 1 WHERE id = ?", [batch])
