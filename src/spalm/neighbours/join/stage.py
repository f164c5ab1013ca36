"""The stage that makes the neighbour table of a corpus: the neighbours of every train, dev and test position."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from spalm.artifact import Draft, Stage
from spalm.compute import Execution
from spalm.console import say
from spalm.corpus import SPLITS, Corpus, TokenSplit
from spalm.errors import InputError
from spalm.memory import MISSING, Encoder, Entries, Memory, source_of_split
from spalm.neighbours.join.bulk_join import BulkJoin, NeighbourSettings, SplitNeighbours
from spalm.neighbours.join.cost import RamBudget
from spalm.neighbours.join.queries import encode_queries
from spalm.neighbours.parallel import chunks
from spalm.neighbours.table import KIND, VERSION, NeighbourTable


def find_neighbours(
    memory: Memory,
    encoder: Encoder,
    corpus: Corpus,
    *,
    settings: NeighbourSettings,
    directory: Path,
    execution: Execution,
) -> NeighbourTable:
    """Returns the neighbour table at `directory`: made now, continued, or found there."""
    memory.require_same_keys({**encoder.identity, "width": memory.width})
    engine = execution.engine
    budget = RamBudget.of(execution.ram, engine)
    parents = {"memory": memory.digest, "corpus": corpus.digest}

    def fill(draft: Draft) -> tuple[dict[str, Any], list[str]]:
        splits = [corpus.split(split) for split in SPLITS]
        entries = memory.entries().with_keys
        if not len(entries):
            raise InputError(f"{memory.directory} holds no keys; add documents with `spalm remember`")
        join = BulkJoin(entries, settings, draft.directory, work=draft.scratch("work"), budget=budget, engine=engine)
        held_out = sum(len(text) for text in splits if text.split != "train")
        join.announce(len(splits[0]), held_out)
        join.prepare()
        facts = {}
        for text in splits:
            found = _neighbours_of_split(
                join, text, memory, encoder=encoder, source=source_of_split(corpus, text.split)
            )
            for name, table in (("ids", found.ids), ("distances", found.distances)):
                draft.declare(f"{text.split}.{name}", table.dtype, table.shape)
            match = _first_matches(entries, text, found.ids)
            say(f"neighbours of {text.split}: recall {found.recall:.3f}; the first has the right token {match:.1%}")
            with_some = float((found.ids[:, 0] != MISSING).mean())
            if text.split == "train" and not with_some:
                raise InputError(
                    f"no training position has a neighbour: neighbours.document = {settings.document}, "
                    f"neighbours.window = {settings.window}, and the memory holds "
                    f"{len(entries.live_documents)} document(s); set neighbours.document=false or a smaller window"
                )
            facts[text.split] = {
                "recall": found.recall,
                "first_match": match,
                "with_neighbours": with_some,
                "judged": found.judged,
                "plan": asdict(found.plan),
            }
        lineage = memory.lineage()
        return {
            "lineage": lineage,
            "more_texts": len(lineage) - 2,  # besides the kind of keys and the training text
            "entries": len(entries),
            **join.facts,
            "splits": facts,
        }, []

    Stage(KIND, VERSION, settings.as_json(), parents).make(directory, fill, restart=execution.restart)
    return NeighbourTable(directory, memory)


def _neighbours_of_split(
    join: BulkJoin, text: TokenSplit, memory: Memory, *, encoder: Encoder, source: dict[str, Any]
) -> SplitNeighbours:
    """Finds the neighbours of a split. Its positions are entries if the memory holds its `source`."""
    first_id, name, settings = memory.first_id(source), text.split, join.settings
    if first_id is None:
        queries = encode_queries(encoder, memory, text, folder=join.work / f"{name}.queries", engine=join.engine)
        return join.find(name, len(text), settings.held_out, queries=queries)
    if name != "train":
        raise InputError(
            f"{memory.directory} remembers the {name} text; what is evaluated must not be in the memory: "
            "forget it, or use another memory"
        )
    return join.find(name, len(text), settings.count, first_id=first_id)


def _first_matches(entries: Entries, text: TokenSplit, ids: Int[np.ndarray, "positions count"]) -> float:
    """Returns how often the token of the first neighbour is the one that comes next."""
    right = counted = 0
    for first, last in chunks(0, len(text), 1 << 20):
        rows = entries.rows(ids[first:last, 0].astype(np.int64))
        there = np.flatnonzero(rows >= 0)
        tokens = entries.take_tokens(rows[there])
        right += int((tokens == text.targets(first + there)).sum())
        counted += len(there)
    return right / max(1, counted)
