"""Removal of forgotten documents from everything in a directory: corpus, tables, records, figures, index, memory.

What is aligned with the positions of a text keeps its place: tokens of a forgotten document become the start symbol,
its name a number, and its rows in tables and records empty. What is interrupted is done again, because the memory,
which knows what was forgotten, is compacted last.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Bool

from spalm.artifact import ERASING, finish_erasure, only_writer
from spalm.corpus import SPLITS, Corpus, Split
from spalm.digests import SUMS
from spalm.errors import InputError
from spalm.files import holds_stage, refuse_links_out_of
from spalm.generation.hugging_face import export_for_transformers
from spalm.maintenance.artifact_rows import erase_documents, erase_ids, erase_rows
from spalm.maintenance.place import Place, Removed
from spalm.maintenance.unfinished import remove_unfinished
from spalm.memory import Entries, Memory, source_of_split
from spalm.memory.forgotten import forgotten_documents, forgotten_entries, is_source
from spalm.neighbours.index.build import DESCRIPTION, IndexDescription, remove_index
from spalm.neighbours.table import KIND as TABLE_KIND
from spalm.runs import RESULTS, FinishedRun
from spalm.runs.records import KIND as RECORDS_KIND

_DRAWN = {".json", ".csv", ".png", ".svg", ".html"}
"""Ends of the names of files of analyses and of the report, which show pieces of text."""


Masks = dict[Split, np.ndarray]
"""Which documents, or positions, of each split."""


def forgotten_in_corpus(
    memory: Memory, corpus: Corpus, split: Split, *, dead: Entries
) -> Bool[np.ndarray, "documents"]:
    """Returns which documents of a split were forgotten: remembered and not alive, or the same as a forgotten one.

    In a corpus that is no source of the memory, such as one with another tokeniser that was set aside, only names can
    be compared: every document that has the name of a forgotten one counts.
    """
    text = corpus.split(split)
    held = dead.live_documents
    if not is_source(memory, corpus.digest):
        names = {*held.names}
        return np.array([name in names for name in text.names], bool)
    found = forgotten_documents(memory, source_of_split(corpus, split), text.begins)
    texts = {
        (name, dead.tokens(*_rows(dead, first, count)).tobytes())
        for name, first, count in zip(held.names, held.first_ids.tolist(), held.entries.tolist())
    }
    names = {name for name, _ in texts}
    for number in np.flatnonzero(np.isin(text.names, list(names))) if names else []:
        own = text.tokens[text.begins[number] : text.ends[number]].astype("<i4").tobytes()
        found[number] |= (text.names[number], own) in texts
    return found


def _rows(entries: Entries, first: int, count: int) -> tuple[int, int]:
    """Returns the rows of a document's entries."""
    row = entries.first_row(first)
    return row, row + count


def remove_forgotten(directory: Path) -> tuple[list[Removed], int]:
    """Removes all that forgotten documents left in a directory; returns what was removed, and the bytes freed."""
    place = Place.of(directory)
    refuse_links_out_of(place.root, but_for=holds_stage)
    for folder in place.stages(ERASING):
        finish_erasure(folder)
    removed: list[Removed] = []
    dead = forgotten_entries(place.memory)
    if len(dead.live_documents):
        removed += remove_unfinished(place)
    if place.is_whole:
        for corpus in place.corpora():
            masks: Masks = {split: forgotten_in_corpus(place.memory, corpus, split, dead=dead) for split in SPLITS}
            removed += _remove_from_corpus(place, corpus, masks)
        removed += _remove_ids(place, dead)
        if removed or len(dead.live_documents):
            removed += _remove_drawn(place)
            if (place.root / RESULTS).exists():
                export_for_transformers(FinishedRun(place.root))  # its tokeniser may have had words of the documents
    removed += _remove_indexes(place)
    names = dead.live_documents.names
    for memory in place.other_memories():
        known = sorted({*names} & {*memory.entries().live_documents.names})
        if known:
            memory.forget(known)
            removed.append(Removed(memory.directory, f"{len(known)} document(s)"))
        memory.compact()
    if len(dead.live_documents):
        removed.append(
            Removed(place.memory.directory, f"{len(dead.live_documents)} document(s), {len(dead):,} entries")
        )
    return removed, place.memory.compact()


def _remove_from_corpus(place: Place, corpus: Corpus, masks: Masks) -> list[Removed]:
    """Removes documents from a corpus, and before that from everything that has a row for each position of it."""
    removed = []
    bounds = {split: corpus.split(split) for split in SPLITS}
    rows: Masks = {split: np.repeat(mask, bounds[split].ends - bounds[split].begins) for split, mask in masks.items()}
    for kind in (TABLE_KIND, RECORDS_KIND):
        for artifact in place.artifacts(kind):
            if artifact.manifest["parents"].get("corpus", corpus.digest) != corpus.digest:
                continue
            with only_writer(artifact.directory):
                changed = erase_rows(artifact, rows)
            if changed:
                removed.append(Removed(artifact.directory, f"rows of {changed} array(s)"))
    with only_writer(corpus.directory):
        count = erase_documents(corpus, masks)
    if count:
        removed.append(Removed(corpus.directory, f"{count} document(s)"))
    return removed


def _remove_ids(place: Place, dead: Entries) -> list[Removed]:
    """Removes forgotten entries from where other positions had them as neighbours."""
    removed = []
    ids = dead.ids(np.arange(len(dead)))
    for kind in (TABLE_KIND, RECORDS_KIND) if len(ids) else ():
        for artifact in place.artifacts(kind):
            with only_writer(artifact.directory):
                changed = erase_ids(artifact, ids)
            if changed:
                removed.append(Removed(artifact.directory, f"neighbours in {changed} array(s)"))
    return removed


def _remove_drawn(place: Place) -> list[Removed]:
    """Removes the files of analyses and of the report: they show pieces of text, and can be made again."""
    removed = []
    for folder in (place.root / "study", place.root / "report"):
        if folder.is_symlink():  # to a stage, which is not drawn
            continue
        files = [path for path in sorted(folder.rglob("*")) if path.suffix in _DRAWN or path.name == SUMS]
        for path in files:
            path.unlink()
        if files:
            removed.append(Removed(folder, f"{len(files)} file(s) of analyses"))
    return removed


def _remove_indexes(place: Place) -> list[Removed]:
    """Removes indexes that may hold keys of forgotten entries; the next search builds them again."""
    removed = []
    dead = place.memory.entries().gaps(place.memory.next_id())
    for folder in place.stages(DESCRIPTION):
        try:
            stale = bool((dead < IndexDescription.read(folder).next_id).any())
        except InputError:
            stale = True
        if stale:
            with only_writer(folder):
                remove_index(folder)
            removed.append(Removed(folder, "the index; the next search builds it again"))
    return removed
