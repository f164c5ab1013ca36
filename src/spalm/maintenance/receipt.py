"""Forgetting with a receipt: documents are removed from a directory, every file is searched, every search asked again.

The receipt says what was removed where and what the search found. Names are in it as digests: it must not be the place
where a document is still named.
"""

import mmap
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from spalm.corpus import SPLITS, Corpus, Tokeniser
from spalm.digests import digest_of_json, digest_of_text, updating_sums
from spalm.files import own_folder, refuse_hole, write_json
from spalm.maintenance.place import Place
from spalm.maintenance.removal import remove_forgotten
from spalm.maintenance.requery import Questions, ask_again
from spalm.maintenance.unfinished import unfinished_training
from spalm.memory import Entries, LiveDocuments, Memory
from spalm.memory.forgotten import is_source

_FOLDER = "receipts"
"""Folder of the receipts in a directory."""
_WINDOW, _WINDOWS = 12, 8
"""Number of tokens of a piece of a document that is searched for, and number of such pieces."""
_LEAST = 4
"""Number of bytes of the shortest piece that is searched for."""
_KEPT = "training that is not finished: parameters, and hidden states of what was read last, without any text"
"""What a receipt says of training that goes on after documents were removed."""


@dataclass(frozen=True)
class Receipt:
    """What forgetting removed, and what is left."""

    path: Path
    """File of the receipt."""
    content: dict[str, Any]

    def lines(self) -> list[str]:
        """Returns the receipt for people."""
        content = self.content
        removed = [f"removed from {each['path']}: {each['what']}" for each in content["removed"]]
        kept = [f"kept in {each['path']}: {each['what']}" for each in content["kept"]]
        found = [f"still in {each['path']}: {each['what']}" for each in content["found"]]
        asked = {way: each for way, each in content["requeried"].items() if each["found"]}
        found += [f"still found by {way}: {each['found']} of {each['asked']}" for way, each in asked.items()]
        searched = f"searched {content['searched']['files']:,} files, {content['searched']['bytes']:,} bytes"
        questions = sum(each["asked"] for each in content["requeried"].values())
        searched += f", and asked {questions:,} questions of lists, tracing and nearest search"
        clean = "" if found else f"nothing of it is left in {self.path.parent.parent}; "
        return [*removed, *kept, *found, f"{searched}: {clean}receipt in {self.path}"]


def forget_with_receipt(directory: Path, names: list[str]) -> Receipt:
    """Forgets documents, removes all that they left in a directory, and searches every file there for them."""
    place, wanted = Place.of(directory), {*names}
    for path in place.files():  # each of them is read below
        refuse_hole(path)
    entries = place.memory.entries()
    live = entries.live_documents
    held = [number for number, name in enumerate(live.names) if name in wanted]
    own = live.first_ids[held]
    view = place.memory.exact.current()
    pieces = [piece for number in held for piece in _pieces(entries, live, number)]
    pieces = [piece for piece in pieces if not view.trace(piece, len(piece), own)]
    ids = np.concatenate([np.zeros(0, np.int64), *(_ids(live, number) for number in held)])
    questions = Questions.of(entries, sorted(wanted), pieces, ids=ids)
    patterns = dict.fromkeys([key.tobytes() for key in questions.keys.astype("<f2")], "a key")
    patterns |= dict.fromkeys([key for memory in place.other_memories() for key in _keys_in(memory, wanted)], "a key")
    patterns |= _patterns(place, pieces, wanted)
    place.memory.forget(sorted(wanted))
    left = place.memory.entries().live_documents.names
    patterns |= {name.encode(): "its name" for name in wanted if not any(name in other for other in left)}
    removed, freed = remove_forgotten(directory)
    found, files, size = _search(place, {key: what for key, what in patterns.items() if len(key) >= _LEAST})
    content: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "documents": [
            {"name_sha256": digest_of_text(live.names[number]), "entries": int(live.entries[number])} for number in held
        ],
        "removed": [{"path": _within(each.path, place.root), "what": each.what} for each in removed],
        "kept": [{"path": _within(path, place.root), "what": _KEPT} for path in unfinished_training(place)],
        "bytes_freed": freed,
        "searched": {"files": files, "bytes": size, "patterns": len(patterns)},
        "found": [{"path": _within(path, place.root), "what": what} for path, what in found],
        "requeried": {way: asdict(asked) for way, asked in ask_again(place, questions).items()},
    }
    content["sha256"] = digest_of_json(content)
    return Receipt(_write(place.root, content), content)


def _write(root: Path, content: dict[str, Any]) -> Path:
    """Writes a receipt to a file of its own."""
    folder = own_folder(root, _FOLDER)
    stamp = content["at"].replace(":", "").replace("-", "").removesuffix("+0000")
    path = folder / f"forget-{stamp}-{content['sha256'][:8]}.json"
    with updating_sums(folder, [path.name]):
        write_json(path, content)
    return path


def _pieces(entries: Entries, documents: LiveDocuments, number: int) -> list[Int[np.ndarray, "tokens"]]:
    """Returns some pieces of a document, as tokens."""
    first, count = int(documents.first_ids[number]), int(documents.entries[number])
    ids = [np.arange(first + start, first + min(count, start + _WINDOW)) for start in _starts(count)]
    return [entries.take_tokens(entries.rows(piece)) for piece in ids if len(piece)]


def _ids(documents: LiveDocuments, number: int) -> Int[np.ndarray, "ids"]:
    """Returns some entries of a document, without the first ones, whose keys others may share."""
    first, count = int(documents.first_ids[number]), int(documents.entries[number])
    last = first + count - 1
    found = np.unique(np.linspace(min(first + _WINDOW - 1, last), last, _WINDOWS).astype(np.int64))
    return found[:count]  # none, if the document has no entry


def _keys_in(memory: Memory, names: set[str]) -> list[bytes]:
    """Returns some keys of the documents of these names in a memory, as its files hold them."""
    entries = memory.entries()
    held = [number for number, name in enumerate(entries.live_documents.names) if name in names]
    ids = np.concatenate([np.zeros(0, np.int64), *(_ids(entries.live_documents, number) for number in held)])
    rows = entries.with_keys.rows(ids)
    return [key.tobytes() for key in entries.with_keys.take(rows[rows >= 0]).astype("<f2")]


def _patterns(place: Place, pieces: list[Int[np.ndarray, "tokens"]], names: set[str]) -> dict[bytes, str]:
    """Returns what files may hold of documents of these names: pieces of their text in the tokens of each corpus."""
    found, tokeniser = {}, None
    for corpus in place.corpora():
        if is_source(place.memory, corpus.digest):
            tokeniser = corpus.tokeniser
            pieces = [piece for piece in pieces if not _stands_elsewhere(piece, corpus, names)]
        else:
            own = [piece for piece in _pieces_in(corpus, names) if not _stands_elsewhere(piece, corpus, names)]
            found |= _forms(own, corpus.tokeniser)
    return found | _forms(pieces, tokeniser)


def _pieces_in(corpus: Corpus, names: set[str]) -> list[Int[np.ndarray, "tokens"]]:
    """Returns some pieces of the documents of these names in a corpus, as tokens."""
    found = []
    for text in map(corpus.split, SPLITS):
        for number in [number for number, name in enumerate(text.names) if name in names]:
            first, last = int(text.begins[number]), int(text.ends[number])
            for start in _starts(last - first):
                found.append(text.tokens[first + start : min(last, first + start + _WINDOW)].astype(np.int64))
    return [piece for piece in found if len(piece)]


def _starts(count: int) -> list[int]:
    """Returns where the pieces of a text of so many tokens begin."""
    return np.unique(np.linspace(0, max(0, count - _WINDOW), _WINDOWS).astype(int)).tolist()


def _stands_elsewhere(piece: Int[np.ndarray, "tokens"], corpus: Corpus, names: set[str]) -> bool:
    """Returns whether a piece of text stands in a document of a corpus that has none of these names."""
    for text in map(corpus.split, SPLITS):
        wanted, size = piece.astype(text.tokens.dtype).tobytes(), text.tokens.dtype.itemsize
        everything, place = text.tokens.tobytes(), -1
        while (place := everything.find(wanted, place + 1)) >= 0:
            if place % size == 0 and text.document_of(place // size)[0] not in names:
                return True
    return False


def _forms(pieces: list[Int[np.ndarray, "tokens"]], tokeniser: Tokeniser | None) -> dict[bytes, str]:
    """Returns pieces of text in every form in which files hold them: tokens, tokens one higher, and letters."""
    found: dict[bytes, str] = {}
    for piece in pieces:
        for dtype in ("<i4", "<i8", "<u2", "u1"):
            if piece.max() + 1 <= np.iinfo(dtype).max:
                found |= {(piece + more).astype(dtype).tobytes(): "its tokens" for more in (0, 1)}
        if tokeniser is not None:
            found[tokeniser.decode(piece.tolist()).strip().encode()] = "its text"
    return found


def _search(place: Place, patterns: dict[bytes, str]) -> tuple[list[tuple[Path, str]], int, int]:
    """Searches every file of a directory for pieces of bytes; returns what was found, and how much was searched."""
    found, files, size = [], 0, 0
    for path in [path for path in place.files() if path.stat().st_size]:
        files, size = files + 1, size + path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            here = {what for piece, what in patterns.items() if content.find(piece) >= 0}
            found += [(path, what) for what in sorted(here)]
    return found, files, size


def _within(path: Path, root: Path) -> str:
    """Returns a path as it is written in a receipt: relative to the directory."""
    path, root = path.resolve(), root.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
