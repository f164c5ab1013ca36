"""Packing: what `spalm attach` made, or a memory, becomes one file (see `archive`).

The same content gives the same bytes. Nothing is packed that is damaged, unfinished, or forgotten and not yet removed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from spalm.artifact import MANIFEST, Artifact, only_writer
from spalm.attachment import ATTACHED_FILE, is_attached
from spalm.attachment.attach import HUB_FILE
from spalm.attachment.attached import base_folder, read_description
from spalm.attachment.keyed_text import CHOICE_FILE
from spalm.digests import SUMS, digest_of_own_file, read_sums, refuse_changed, sums_as_text
from spalm.errors import InputError
from spalm.files import child, is_inside, open_regular, replacing
from spalm.generation.hugging_face.export import CONFIG, TOKENISER_FILES
from spalm.maintenance.archive import (
    AT_ONCE,
    CONTENT,
    END,
    LISTED_FOLDERS,
    MODEL_FOLDER,
    header,
    is_member_name,
    padding,
)
from spalm.maintenance.verify import verify_directory
from spalm.memory import Memory, is_memory
from spalm.memory.catalogue import Catalogue
from spalm.memory.forgotten import forgotten_entries, has_unfinished
from spalm.runs import RESULTS


@dataclass(frozen=True)
class PackedArchive:
    """What was packed."""

    files: int
    size: int
    """Number of bytes of the archive."""


def pack(directory: Path, file: Path, *, with_model: bool = False) -> PackedArchive:
    """Writes what `spalm attach` made, or a memory, into one file.

    `with_model` packs the copy of the base model that lies in the directory too.
    """
    memory = _memory_in(directory)
    if file.exists() or file.is_symlink():
        raise InputError(f"{file} exists; give another name, or remove it")
    if is_inside(file, directory):
        raise InputError(f"{file} would lie in {directory} itself; give a place outside of it")
    with _unchanging(memory):
        packed = {f"{CONTENT}/{name}": path for name, path in _files(directory, with_model=with_model)}
        for name, path in packed.items():
            if not is_member_name(name):
                raise InputError(f"{path} cannot be packed: a memory has no file of this name; move it elsewhere")
        _verify(directory, with_model=with_model)
        digests = {name: digest_of_own_file(path) for name, path in sorted(packed.items())}
        with replacing(file) as temporary, temporary.open("wb") as sink:
            listed = sums_as_text(digests).encode()
            sink.write(header(SUMS, len(listed)) + listed + bytes(padding(len(listed))))
            for name, digest in digests.items():
                _append(sink, name, packed[name], digest=digest)
            sink.write(END)
            size = sink.tell()
    return PackedArchive(len(packed), size)


def _memory_in(directory: Path) -> Memory:
    """Returns the memory that is to be packed; refuses a directory that is neither a memory nor what attach made."""
    if (directory / RESULTS).exists():
        raise InputError(f"{directory} is a run, of which only the memory can be packed; give {directory / 'memory'}")
    if not is_attached(directory) and not is_memory(directory):
        raise InputError(f"{directory} is neither what `spalm attach` made nor a memory; give one of these")
    return Memory(directory / "memory" if is_attached(directory) else directory)


@contextmanager
def _unchanging(memory: Memory) -> Iterator[None]:
    """Keeps others from changing a memory; refuses one that holds what nobody is to get."""
    with only_writer(memory.directory):
        if has_unfinished(memory):
            raise InputError(f"{memory.directory}: a `remember` was interrupted; run it again, to its end, then pack")
        if forgotten := len(forgotten_entries(memory).live_documents):
            raise InputError(
                f"{memory.directory} still has the bytes of {forgotten:,} forgotten document(s); run `spalm compact` "
                "first"
            )
        memory.catalogue.settle()
        yield


def _files(directory: Path, *, with_model: bool) -> Iterator[tuple[str, Path]]:
    """Yields the files to be packed, by their names below the directory."""
    if not is_attached(directory):
        if with_model:
            raise InputError(f"--with-model: {directory} is a memory alone, without a model; leave it out")
        yield from _memory_files(Memory(directory))
        return
    yield from ((name, child(directory, name)) for name in _own_names(directory))
    for folder in LISTED_FOLDERS:
        stage = child(directory, folder)
        listed = {MANIFEST, *Artifact(stage).manifest["files"], *_listed(stage)}
        yield from ((f"{folder}/{name}", child(stage, name)) for name in listed)
    yield from ((f"memory/{name}", path) for name, path in _memory_files(Memory(directory / "memory")))
    if with_model:
        base = _own_base(directory)
        names = (path.name for path in base.iterdir() if path.is_file())
        yield from (
            (f"{MODEL_FOLDER}/{name}", child(base, name))
            for name in names
            if is_member_name(f"{CONTENT}/{MODEL_FOLDER}/{name}")
        )


def _own_names(directory: Path) -> set[str]:
    """Returns the names of the files of an attached folder itself that are packed: what attach made, no other files."""
    known = {ATTACHED_FILE, CHOICE_FILE, HUB_FILE, CONFIG, *_listed(directory)}
    files = [path.name for path in directory.iterdir() if path.is_file()]
    return {name for name in files if name in known or name.startswith(TOKENISER_FILES)}


def _listed(folder: Path) -> Iterable[str]:
    """Returns the names in the list of digests of a folder, and that of the list."""
    sums = read_sums(folder)
    return () if sums is None else (*sums, SUMS)


def _memory_files(memory: Memory) -> Iterator[tuple[str, Path]]:
    for path in memory.own_files():
        if path.name not in Catalogue.MARKS:
            yield str(path.relative_to(memory.directory)), path


def _own_base(directory: Path) -> Path:
    """Returns the folder of the base model's copy in an attached folder; refuses one without."""
    base = read_description(directory)[0]
    if base.resolve() != base_folder(directory, MODEL_FOLDER).resolve() or not base.is_dir():
        raise InputError(
            f"--with-model: {directory} has no copy of its base model, which is {base}; "
            "`spalm.load(DIR).to_transformers().save_pretrained(COPY)` makes a folder with one"
        )
    return base


def _verify(directory: Path, *, with_model: bool) -> None:
    """Raises an error if anything that is packed is damaged."""
    folders = [directory]
    if is_attached(directory):
        refuse_changed(directory, read_sums(directory) or {}, "restore it from a copy, or attach again")
        folders = [directory / name for name in (*LISTED_FOLDERS, "memory")]
        folders += [directory / MODEL_FOLDER] if with_model and (directory / MODEL_FOLDER / SUMS).exists() else []
    for folder in folders:
        verify_directory(folder).summary()


def _append(sink: BinaryIO, name: str, path: Path, *, digest: str) -> None:
    """Writes a file into the archive; refuses one that changed since its digest was computed."""
    with open_regular(path) as source:
        begin, hashed = sink.tell(), hashlib.sha256()
        sink.write(header(name, path.stat().st_size))
        while block := source.read(AT_ONCE):
            hashed.update(block)
            sink.write(block)
        size = sink.tell() - begin - len(header(name, 0))
    if hashed.hexdigest() != digest or size != path.stat().st_size:
        raise InputError(f"{path} changed while it was packed; pack again")
    sink.write(bytes(padding(size)))
