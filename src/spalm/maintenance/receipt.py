"""Forgetting with a receipt: documents are removed from a directory, and every file of it is searched for them.

The receipt says what was removed where and what the search found. Names are in it as digests: it must not be the place
where a document is still named.
"""

import mmap
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from spalm.corpus import SPLITS, Corpus, Tokeniser
from spalm.corpus.tokens import CORPUS_KIND
from spalm.digests import digest_of_json, digest_of_text, updating_sums
from spalm.files import own_folder, write_json
from spalm.maintenance.removal import Place, remove_forgotten
from spalm.memory import Entries, LiveDocuments

_FOLDER = "receipts"
"""Folder of the receipts in a directory."""
_WINDOW, _WINDOWS = 12, 8
"""Number of tokens of a piece of a document that is searched for, and number of such pieces."""
_LEAST = 4
"""Number of bytes of the shortest piece that is searched for."""


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
        searched = f"searched {content['searched']['files']:,} files, {content['searched']['bytes']:,} bytes"
        found = [f"still in {each['path']}: {each['what']}" for each in content["found"]]
        return [*removed, *found, f"{searched}: {'' if found else 'nothing of it is left; '}receipt in {self.path}"]


def forget_with_receipt(directory: Path, names: list[str]) -> Receipt:
    """Forgets documents, removes all that they left in a directory, and searches every file there for them."""
    place, wanted = Place.of(directory), {*names}
    corpora = [Corpus(found.directory) for found in place.artifacts(CORPUS_KIND)] if place.is_whole else []
    live, entries = place.memory.entries().live_documents, place.memory.entries()
    held = [number for number, name in enumerate(live.names) if name in wanted]
    pieces = [piece for number in held for piece in _pieces(entries, live, number)]
    keys = [key for number in held for key in _keys(entries, live, number)]
    place.memory.forget(sorted(wanted))
    view, left = place.memory.exact.current(), place.memory.entries().live_documents.names
    pieces = [piece for piece in pieces if not view.trace(piece, least=len(piece))]
    pieces = [piece for piece in pieces if not any(_stands_elsewhere(piece, corpus, wanted) for corpus in corpora)]
    patterns = _forms(pieces, corpora[0].tokeniser if corpora else None) | dict.fromkeys(keys, "a key")
    patterns |= {name.encode(): "its name" for name in wanted if not any(name in other for other in left)}
    removed, freed = remove_forgotten(directory)
    found, files, size = _search(place.root, {key: what for key, what in patterns.items() if len(key) >= _LEAST})
    content: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "documents": [
            {"name_sha256": digest_of_text(live.names[number]), "entries": int(live.entries[number])} for number in held
        ],
        "removed": [{"path": _within(each.path, place.root), "what": each.what} for each in removed],
        "bytes_freed": freed,
        "searched": {"files": files, "bytes": size, "patterns": len(patterns)},
        "found": [{"path": _within(path, place.root), "what": what} for path, what in found],
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
    starts = np.unique(np.linspace(0, max(0, count - _WINDOW), _WINDOWS).astype(int))
    ids = [np.arange(first + start, first + min(count, start + _WINDOW)) for start in starts.tolist()]
    return [entries.take_tokens(entries.rows(piece)) for piece in ids if len(piece)]


def _keys(entries: Entries, documents: LiveDocuments, number: int) -> list[bytes]:
    """Returns some keys of a document as they are stored, without the first ones, which others may share."""
    first, count = int(documents.first_ids[number]), int(documents.entries[number])
    ids = np.unique(np.linspace(first + min(_WINDOW, count - 1), first + count - 1, _WINDOWS).astype(int))
    rows = entries.with_keys.rows(ids)
    return [entries.with_keys.keys(row, row + 1).tobytes() for row in rows[rows >= 0].tolist()]


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


def _search(root: Path, patterns: dict[bytes, str]) -> tuple[list[tuple[Path, str]], int, int]:
    """Searches every file below a folder for pieces of bytes; returns what was found, and how much was searched."""
    found, files, size = [], 0, 0
    for path in sorted(root.rglob("*")):
        if not path.is_file() or not path.stat().st_size:
            continue
        files, size = files + 1, size + path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            here = {what for piece, what in patterns.items() if content.find(piece) >= 0}
            found += [(path, what) for what in sorted(here)]
    return found, files, size


def _within(path: Path, root: Path) -> str:
    """Returns a path as it is written in a receipt: relative to the directory."""
    path, root = path.resolve(), root.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
