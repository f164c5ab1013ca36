"""A memory as one file: the same bytes for the same content, and nothing left where the file is not right."""

import hashlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from spalm.api import load
from spalm.compute import Execution, Hardware
from spalm.digests import sums_as_text
from spalm.errors import DamagedError, InputError
from spalm.maintenance import pack, unpack, verify_directory
from spalm.maintenance.archive import END, header, padding
from spalm.memory import Memory, remember, source_of_text
from spalm.memory.catalogue import Catalogue
from spalm.memory.forgotten import has_unfinished
from support.commands import Fork, refused, spalm
from support.killed import unpack_and_die
from support.servers import copied
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

CPU = Execution(Hardware("cpu", 1))
ENCODER = StubEncoder()
PROMPT = "ka1 lo3 mi4 .\nka2"
Members = dict[str, bytes]


def contents(folder: Path) -> Members:
    """The files of a folder and of those inside it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def memory(tmp_path) -> Memory:
    made = new_memory(tmp_path / "memory", ENCODER)
    for number in range(3):
        text = stream(random_texts(np.random.default_rng(number), 5, f"batch-{number}"))
        remember(made, ENCODER if number else None, text, source=source_of_text(text))
    return made


@pytest.fixture
def packed(memory, tmp_path) -> Path:
    pack(memory.directory, tmp_path / "packed.tar")
    return tmp_path / "packed.tar"


def members_of(file: Path) -> Members:
    with tarfile.open(file) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def tar_of(members: Members) -> bytes:
    """An archive in the form in which they are packed."""
    parts = [header(name, len(content)) + content + bytes(padding(len(content))) for name, content in members.items()]
    return b"".join(parts) + END


def with_digests(members: Members) -> Members:
    """The members with a list of digests that fits them."""
    others = {name: content for name, content in sorted(members.items()) if name != "SHA256SUMS"}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in others.items()}
    return {"SHA256SUMS": sums_as_text(digests).encode(), **others}


def test_a_memory_comes_back_byte_for_byte(memory, packed, tmp_path):
    assert unpack(packed, tmp_path / "new") is None
    assert contents(tmp_path / "new") == contents(memory.directory)
    assert not verify_directory(tmp_path / "new").damaged
    assert Memory(tmp_path / "new").digest == memory.digest
    pack(tmp_path / "new", tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == packed.read_bytes()


def test_the_same_content_gives_the_same_bytes(memory, packed, tmp_path):
    copy = shutil.copytree(memory.directory, tmp_path / "copy", copy_function=shutil.copyfile)
    (copy / "projection.0123456789abcdef.tmp").write_text("left by a kill")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    pack(copy, tmp_path / "copy.tar")
    assert (tmp_path / "copy.tar").read_bytes() == packed.read_bytes()
    with tarfile.open(packed) as archive:
        found = archive.getmembers()
    assert [member.name for member in found] == sorted(member.name for member in found)
    assert {(each.uid, each.gid, each.uname, each.gname, each.mtime, each.mode) for each in found} == {
        (0, 0, "", "", 0, 0o644)
    }


def test_the_tools_of_the_system_read_it(packed, tmp_path):
    (tmp_path / "by-hand").mkdir()
    subprocess.run(["tar", "xf", packed, "-C", tmp_path / "by-hand"], check=True)
    found = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path / "by-hand", capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_a_model_with_its_memory(attached_folder, tmp_path):
    folder = copied(attached_folder, tmp_path / "tiny", "{{ messages[0].content }}")
    (folder / "notes.txt").write_text("not for others")
    expected = load(folder, execution=CPU).generate(PROMPT, max_tokens=5).text
    packed = pack(folder, tmp_path / "tiny.tar")
    assert packed.size == (tmp_path / "tiny.tar").stat().st_size
    assert unpack(tmp_path / "tiny.tar", tmp_path / "new") is None, "the base model is where it was"
    there, here = contents(tmp_path / "new"), contents(folder)
    assert all(here[name] == content for name, content in there.items())
    left_out = {name for name in here if name not in there}
    assert {name.split("/")[0] for name in left_out} <= {"known-digests.json", "index", "notes.txt"}
    assert "chat_template.jinja" in there
    found = verify_directory(tmp_path / "new")
    assert not found.damaged
    assert len(there) == packed.files
    assert load(tmp_path / "new", execution=CPU).generate(PROMPT, max_tokens=5).text == expected


def test_a_base_model_elsewhere_is_named_and_another_is_refused(attached_copy, tmp_path):
    pack(attached_copy, tmp_path / "tiny.tar")
    new = tmp_path / "new"
    assert unpack(tmp_path / "tiny.tar", new) == new / "model", "weights are not packed unless that is asked for"
    with pytest.raises(InputError, match="is gone; put it back"):
        load(new, execution=CPU)
    base = shutil.copytree(attached_copy / "model", tmp_path / "base")
    assert unpack(tmp_path / "tiny.tar", tmp_path / "named", model=base) is None
    assert not verify_directory(tmp_path / "named").damaged
    expected = load(attached_copy, execution=CPU).generate(PROMPT, max_tokens=3).text
    assert load(tmp_path / "named", execution=CPU).generate(PROMPT, max_tokens=3).text == expected
    (base / "config.json").write_text((base / "config.json").read_text() + " ")
    with pytest.raises(InputError, match="is not the model"):
        load(tmp_path / "named", execution=CPU)
    for wrong, why in ((base, "is not the model that the memory was made with"), (tmp_path, "there is no model")):
        with pytest.raises(InputError, match=why):
            unpack(tmp_path / "tiny.tar", tmp_path / "other", model=wrong)
        assert not list(tmp_path.glob("other*"))


def test_with_the_model_it_needs_nothing_else(attached_copy, attached_folder, tmp_path):
    pack(attached_copy, tmp_path / "tiny.tar", with_model=True)
    assert unpack(tmp_path / "tiny.tar", tmp_path / "new") is None
    assert contents(tmp_path / "new" / "model") == contents(attached_copy / "model")
    assert not verify_directory(tmp_path / "new").damaged
    expected = load(attached_copy, execution=CPU).generate(PROMPT, max_tokens=3).text
    assert load(tmp_path / "new", execution=CPU).generate(PROMPT, max_tokens=3).text == expected
    with pytest.raises(InputError, match="has no copy of its base model"):
        pack(attached_folder, tmp_path / "other.tar", with_model=True)
    assert not (tmp_path / "other.tar").exists()


def test_what_is_forgotten_unfinished_or_damaged_is_not_packed(memory, tmp_path):
    file = tmp_path / "packed.tar"
    memory.forget(["batch-1-0"])
    with pytest.raises(InputError, match="run `spalm compact`"):
        pack(memory.directory, file)
    memory.compact()
    with memory.catalogue.change() as connection:
        connection.execute("INSERT INTO batches (source, first_id, entries) VALUES ('{}', 1000, 1)")
    assert has_unfinished(memory)
    with pytest.raises(InputError, match="was interrupted"):
        pack(memory.directory, file)
    with memory.catalogue.change() as connection:
        connection.execute("DELETE FROM batches WHERE NOT finished")
    tokens = next(memory.directory.glob("shards/*.tokens"))
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedError):
        pack(memory.directory, file)
    tokens.write_bytes(content)
    assert not list(tmp_path.glob("packed*"))
    (memory.directory / Catalogue.MARKS[1]).touch()  # as a kill leaves it just before the digest is written
    assert pack(memory.directory, file).files == len(contents(memory.directory))
    unpack(file, tmp_path / "new")
    assert not verify_directory(tmp_path / "new").damaged


def test_places_that_are_taken_are_refused(memory, packed, tmp_path):
    for file, why in ((packed, "exists"), (memory.directory / "x.tar", "would lie in")):
        with pytest.raises(InputError, match=why):
            pack(memory.directory, file)
    for directory in (memory.directory, packed):
        with pytest.raises(InputError, match="exists; give a new folder"):
            unpack(packed, directory)
    with pytest.raises(InputError, match="neither what"):
        pack(tmp_path, tmp_path / "x.tar")
    with pytest.raises(InputError, match="a memory alone"):
        pack(memory.directory, tmp_path / "x.tar", with_model=True)


def test_the_disk_is_asked_before_anything_is_written(packed, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match="has room for 100"):
        unpack(packed, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


def test_every_flipped_byte_is_found(packed, tmp_path):
    content = packed.read_bytes()
    random = np.random.default_rng(0)
    for place in sorted({*range(0, 3 * 512, 7), *random.integers(0, len(content), 300).tolist()}):
        packed.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        with pytest.raises(InputError):
            unpack(packed, tmp_path / "new")
        assert not list(tmp_path.glob("new*"))
    for length in (0, 1, 511, 512, 5000, len(content) - 1025, len(content) - 512, len(content) - 1):
        packed.write_bytes(content[:length])
        with pytest.raises(InputError):
            unpack(packed, tmp_path / "new")
    packed.write_bytes(content + b"\0")
    with pytest.raises(InputError, match="does not end"):
        unpack(packed, tmp_path / "new")


def changed(**changes: object) -> Callable[[tarfile.TarInfo], None]:
    return lambda member: [setattr(member, name, value) for name, value in changes.items()]


HEADERS = {
    "link": changed(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": changed(type=tarfile.LNKTYPE, linkname="content/memory.json"),
    "device": changed(type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "pipe": changed(type=tarfile.FIFOTYPE),
    "folder": changed(type=tarfile.DIRTYPE),
    "sparse": changed(type=tarfile.GNUTYPE_SPARSE),
    "continuous": changed(type=tarfile.CONTTYPE),
    "absolute": changed(name="/tmp/evil.json"),
    "above": changed(name="content/../../evil.json"),
    "above, encoded as one": changed(name="content/shards/../memory.json"),
    "elsewhere": changed(name="evil.json"),
    "code": changed(name="content/evil.py"),
    "pickle": changed(name="content/evil.bin"),
    "index": changed(name="content/index/index.json"),
    "known digests": changed(name="content/known-digests.json"),
    "hidden": changed(name="content/.evil.json"),
    "deep": changed(name="content/corpus/corpus/train.tokens"),
    "control": changed(name="content/a\nb.json"),
    "other letters": changed(name="content/\u202etxt.json"),
    "long": changed(name=f"content/{'a' * 200}.json"),
    "owner": changed(uid=7),
    "time": changed(mtime=7),
    "program": changed(mode=0o4755),
    "negative": changed(size=-512),
    "huge": changed(size=1 << 60),
}
"""What may be wrong with the header of a member."""


@pytest.mark.parametrize("what", HEADERS)
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_hostile_members_are_refused_before_anything_is_written(packed, tmp_path, what, form):
    members = members_of(packed)
    member = tarfile.TarInfo("content/projection")
    member.size = 4
    HEADERS[what](member)
    try:
        head = member.tobuf(form, "utf-8", "surrogateescape")
    except ValueError:
        pytest.skip("this form cannot express it")
    content = b"evil" + bytes(508) if 0 <= member.size <= 512 and member.isreg() else b""
    for names in (sorted([*members, "content/projection"]), [*members, "content/projection"]):
        parts = {name: header(name, len(each)) + each + bytes(padding(len(each))) for name, each in members.items()}
        parts["content/projection"] = head + content
        packed.write_bytes(b"".join(parts[name] for name in names) + END)
        with pytest.raises(InputError) as error:
            unpack(packed, tmp_path / "new")
        assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"memory", "packed.tar"}


def test_members_that_are_missing_twice_or_more_are_refused(packed, tmp_path):
    members = members_of(packed)

    def refuses(content: bytes, why: str) -> None:
        packed.write_bytes(content)
        with pytest.raises(InputError, match=why):
            unpack(packed, tmp_path / "new")
        assert {path.name for path in tmp_path.iterdir()} == {"memory", "packed.tar"}

    missing = {name: content for name, content in members.items() if not name.endswith("memory.json")}
    refuses(tar_of(missing), "is no packed memory")
    refuses(tar_of(with_digests(missing)), "is no packed memory")
    more = dict(sorted({**members, "content/projection": b"x"}.items()))
    refuses(tar_of(more), "holds other files than its list")
    refuses(tar_of(dict(reversed(members.items()))), "not as `spalm pack` writes it|cannot have")
    refuses(tar_of({**with_digests({**members, "content/attached.json": b"{}"})}), "is no packed memory")
    twice = tar_of(members)[: -len(END)] + tar_of({"content/memory.json": b"{}"})
    refuses(twice, "not as `spalm pack` writes it")
    other = {**members, "content/memory.json": members["content/memory.json"].replace(b"1", b"2", 1)}
    refuses(tar_of(other), "is damaged .the digest of content/memory.json differs")
    refuses(tar_of({name: content for name, content in members.items() if name != "SHA256SUMS"}), "is no packed memory")
    refuses(END, "is no packed memory")
    refuses(b"", "does not end")
    broken = {**members, "SHA256SUMS": members["SHA256SUMS"].replace(b"#", b"!")}
    refuses(tar_of(broken), "its list of digests is not as it was written")
    first = next(iter(members))
    between = bytearray(tar_of(members))
    between[512 + len(members[first])] = 1
    refuses(bytes(between), "something between its members")


def test_a_description_that_cannot_be_read_leaves_nothing(attached_folder, tmp_path):
    pack(attached_folder, tmp_path / "tiny.tar")
    members = members_of(tmp_path / "tiny.tar")
    own = {name: content for name, content in members.items() if name != "content/SHA256SUMS"}
    for hostile in (b"{", b"[]", members["content/attached.json"].replace(b'"model": "', b'"model": "../..')):
        (tmp_path / "tiny.tar").write_bytes(tar_of(with_digests({**own, "content/attached.json": hostile})))
        with pytest.raises(DamagedError) as error:
            unpack(tmp_path / "tiny.tar", tmp_path / "new")
        assert "\n" not in str(error.value)
        assert not list(tmp_path.glob("new*"))


def test_files_that_are_no_archives_are_refused(packed, tmp_path):
    content = packed.read_bytes()
    compressed = io.BytesIO()
    with tarfile.open(fileobj=compressed, mode="w:gz") as archive:
        archive.add(packed, "x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gz").write_bytes(compressed.getvalue())
    (tmp_path / "noise").write_bytes(np.random.default_rng(0).bytes(5000))
    (tmp_path / "hole").write_bytes(content)
    os.truncate(tmp_path / "hole", 1 << 40)
    for name in ("pipe", "gz", "noise", "hole", "memory"):
        with pytest.raises(InputError):
            unpack(tmp_path / name, tmp_path / "new")
        assert not list(tmp_path.glob("new*"))


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 3, -1])
def test_a_kill_leaves_nothing_under_the_name_and_the_next_attempt_cleans_up(packed, tmp_path, left):
    process = Fork(unpack_and_die, packed, tmp_path / "new", left)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "new").exists()
    (half,) = tmp_path.glob("new.*.tmp")
    assert half.is_dir()
    unpack(packed, tmp_path / "new")
    assert contents(tmp_path / "new") == contents(tmp_path / "memory")
    assert not half.exists()


def test_an_error_while_it_is_written_leaves_nothing(packed, tmp_path, monkeypatch):
    module = import_module("spalm.maintenance.unpack")
    monkeypatch.setattr(module, "sync_to_disk", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        unpack(packed, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


@pytest.mark.slow
def test_the_commands(memory, tmp_path):
    file, new = tmp_path / "packed.tar", tmp_path / "below" / "new"
    made = spalm("pack", memory.directory, file)
    assert made.returncode == 0, made.stderr
    assert f"{len(contents(memory.directory))} files" in made.stderr
    assert "every file is as it was packed" in spalm("unpack", file, new).stderr
    assert "every byte is as it was written" in spalm("verify", new).stderr
    assert "exists" in refused("unpack", file, new)
    assert "exists" in refused("pack", memory.directory, file)
    assert "leave it out" in refused("unpack", file, tmp_path / "other", "--model", new)
