"""Files: what foreign folders hold is not trusted, and nothing is written but the file itself."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spalm.artifact import MANIFEST, Artifact, only_writer
from spalm.digests import SUMS, KnownDigests, digest_of_file, digest_of_own_file, read_sums, refuse_changed, sum_up
from spalm.errors import DamagedError, InputError
from spalm.files import (
    allow_as_umask_says,
    child,
    holds_stage,
    own_folder,
    read_json,
    read_text,
    refuse_links_out_of,
    replacing,
    write_atomically,
)
from spalm.maintenance import verify_directory
from spalm.memory.memory import IDENTITY
from spalm.neighbours.index.build import DESCRIPTION
from spalm.settings import read_yaml
from spalm.training.checkpoint import save_tensors


def test_a_link_under_a_name_that_can_be_guessed_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in ("file", "file.tmp", "file.0123abcd.tmp"):
        (folder / name).symlink_to(victim)
    write_atomically(folder / "file", "theirs")
    assert victim.read_text() == "mine"
    assert (folder / "file").read_text() == "theirs"
    assert not (folder / "file").is_symlink()


def test_what_a_kill_left_is_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "file"

    def killed() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert [left.read_text() for left in tmp_path.iterdir()] == ["half"]
    write_atomically(path, "whole")
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_can_be_read_by_whom_the_umask_says(tmp_path, umask):
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "file") as temporary:
            temporary.unlink()  # as a library does that writes a file of its own
            temporary.touch(0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


def test_a_file_and_the_folder_that_names_it_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink()))
    write_atomically(tmp_path / "file", "x")
    assert [path.name.split(".")[0] for path in synced] == ["file", tmp_path.name]
    synced.clear()
    write_atomically(tmp_path / "file", "x", sync=False)
    assert not synced


def test_tensors_can_be_read_by_whom_the_umask_says(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(3)})
    path = tmp_path / "y.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    path.chmod(0o600)
    allow_as_umask_says([path])
    (tmp_path / "usual").touch()
    modes = {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "usual").stat().st_mode)}
    assert load_file(path)["a"].shape == (3,)


def test_links_out_of_a_folder_are_refused_before_anything_is_written_there(tmp_path):
    folder = tmp_path / "foreign"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "own").symlink_to(folder)
    refuse_links_out_of(folder)
    (folder / "inner" / "exact").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"inner/exact is a symbolic link that leads out"), only_writer(folder):
        raise AssertionError("written")


def test_links_to_whole_stages_may_lead_elsewhere_where_that_is_allowed(tmp_path):
    folder, stage, pictures = (tmp_path / name for name in ("foreign", "stage", "pictures"))
    for each in (folder, stage, pictures):
        each.mkdir()
    for name in (MANIFEST, IDENTITY, DESCRIPTION):
        (stage / name).touch()
        (folder / "own").symlink_to(stage)
        refuse_links_out_of(folder, but_for=holds_stage)
        with pytest.raises(InputError, match="own is a symbolic link that leads out"):
            refuse_links_out_of(folder)
        (stage / name).unlink()
        (folder / "own").unlink()
    (folder / "own").symlink_to(pictures)
    with pytest.raises(InputError, match="own is a symbolic link that leads out"):
        refuse_links_out_of(folder, but_for=holds_stage)


def nested(folder: Path, count: int) -> Path:
    """A folder with folders within one another."""
    folder.mkdir()
    inner = folder
    for _ in range(count):
        inner = inner / "a"
        inner.mkdir()
    return folder


def test_folders_within_one_another_without_end_are_refused_in_a_line(tmp_path):
    with pytest.raises(InputError, match="more than 100 folders within one another"):
        refuse_links_out_of(nested(tmp_path / "deep", 150))
    refuse_links_out_of(nested(tmp_path / "usual", 20))


def test_an_array_that_is_a_hole_is_not_read(tmp_path):
    """Its manifest fits: it takes no space, and hours to read."""
    stage, size = tmp_path / "stage", 1 << 42
    stage.mkdir()
    (stage / "tokens").touch()
    os.truncate(stage / "tokens", size)
    entry = {"bytes": size, "sha256": "0" * 64, "dtype": "|u1", "shape": [size]}
    about = {"kind": "x", "version": 1, "settings": {}, "parents": {}, "facts": {}, "files": {"tokens": entry}}
    (stage / MANIFEST).write_text(json.dumps(about))
    for use in (lambda: Artifact(stage), lambda: digest_of_own_file(stage / "tokens")):
        with pytest.raises(DamagedError, match="of which hardly any are there"):
            use()
    assert "of which hardly any are there" in verify_directory(stage).damaged[0]


def test_a_folder_that_a_link_puts_elsewhere_is_not_written_to(tmp_path):
    (tmp_path / "run").mkdir()
    assert own_folder(tmp_path / "run", "study", "test").is_dir()
    (tmp_path / "run" / "report").symlink_to(tmp_path)
    with pytest.raises(InputError, match="leads out of"):
        own_folder(tmp_path / "run", "report", "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/hostname", "a/b", "a\0", "a" * 256])
def test_only_names_of_files_in_the_folder_count(tmp_path, name):
    with pytest.raises(InputError):
        child(tmp_path, name)


def test_a_link_to_a_file_elsewhere_is_not_read(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="leads out of"):
        child(tmp_path / "folder", "x")


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "x").symlink_to(tmp_path / "x")
    for use in (lambda: child(tmp_path, "x"), lambda: refuse_links_out_of(tmp_path), lambda: own_folder(tmp_path, "x")):
        with pytest.raises(InputError, match="leads out of"):
            use()


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        for read in (read_json, digest_of_file, read_text):
            with pytest.raises(InputError, match="not a regular file"):
                read(path)


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"a": 1}'],
    ids=["cut", "bytes", "deep", "long", "type"],
)
def test_json_of_another_form_is_damage_in_a_line(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"x.json is damaged .*; make it again") as caught:
        read_json(path, list[int])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedError, match="more than"):
        read_text(path, 1 << 10)


def test_a_hole_in_the_place_of_a_description_is_not_read(tmp_path):
    """It takes no space, and hours to read."""
    for name in ("manifest.json", "metrics.jsonl", "recipe.yaml"):
        (tmp_path / name).write_text("{}")
        sum_up(tmp_path, [name])
        os.truncate(tmp_path / name, 1 << 42)
        for use in (
            lambda name=name: refuse_changed(tmp_path, [name], ""),
            lambda: verify_directory(tmp_path).summary(),
        ):
            with pytest.raises(DamagedError, match="more than"):
                use()
        (tmp_path / name).unlink()


def test_text_is_utf8_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "latin-1")
    write_atomically(tmp_path / "x", "café ∑")
    assert read_text(tmp_path / "x") == "café ∑"


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\n" + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{f'*{chr(97 + n)}, ' * 9}]\n" for n in range(9)),
        "a: &a [*a]",
        "[" * 5000,
        "a: 2020-13-45",
        "a: [",
        "a: " + "x" * (1 << 21),
    ],
    ids=["grows", "endless", "deep", "date", "cut", "large"],
)
def test_yaml_that_grows_or_is_none_is_refused_in_a_line(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_yaml(path)
    assert len(str(caught.value)) < 1000


def test_any_flip_in_a_list_of_digests_is_found(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    sum_up(tmp_path, ["one", "two"])
    assert set(read_sums(tmp_path) or {}) == {"one", "two"}
    good = (tmp_path / SUMS).read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        (tmp_path / SUMS).write_bytes(bad)
        with pytest.raises(DamagedError):
            read_sums(tmp_path)
    (tmp_path / SUMS).write_bytes(good)
    (tmp_path / "two").write_text("Two")
    refuse_changed(tmp_path, ["one"], "")
    with pytest.raises(DamagedError, match="two is damaged"):
        refuse_changed(tmp_path, ["two"], "")


def test_a_known_digest_is_not_computed_again_until_the_file_changes(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr("spalm.digests.digest_of_file", lambda path: read.append(path.name) or path.read_text())
    large, kept = tmp_path / "large", tmp_path / "known.json"
    large.write_text("one")
    assert KnownDigests(kept).of(large) == KnownDigests(kept).of(large) == "one"
    assert read == ["large"]
    times = large.stat()
    large.write_text("two")
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))  # the size and the time of the content are as before
    assert KnownDigests(kept).of(large) == "two"
    content = json.loads(kept.read_text())
    content["files"]["large"][-1] = "three"
    kept.write_text(json.dumps(content))
    assert KnownDigests(kept).of(large) == "two"
