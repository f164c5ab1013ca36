"""Artifacts: whole or not there, made once, never mixed up."""

import json
import multiprocessing
import time

import numpy as np
import pytest

from spalm.artifact import Artifact, Draft, Stage
from spalm.errors import InputError


def make(draft: Draft):
    draft.write_array("numbers", np.arange(7, dtype=np.int32))
    return {"sum": 21}, []


def made(directory, settings=None, parents=None, make=make, restart=False):
    return Stage("numbers", 1, settings or {"a": 1}, parents or {}).make(directory, make, restart=restart)


def fail(_):
    raise AssertionError("made again")


def test_round_trip(tmp_path):
    found = made(tmp_path / "x")
    np.testing.assert_array_equal(found.array("numbers"), np.arange(7))
    assert found.facts == {"sum": 21}
    assert not found.array("numbers").flags.writeable
    found.verify()


def test_the_same_work_is_not_done_twice(tmp_path):
    first = made(tmp_path / "x")
    assert made(tmp_path / "x", make=fail).digest == first.digest


@pytest.mark.parametrize("change", [{"settings": {"a": 2}}, {"parents": {"corpus": "other"}}])
def test_other_settings_or_parents_are_other_work_and_the_old_is_kept(tmp_path, change):
    old = made(tmp_path / "x").digest
    assert made(tmp_path / "x", **change).digest != old
    assert Artifact(tmp_path / "x.previous").digest == old


def test_nothing_that_was_set_aside_is_removed(tmp_path):
    digests = [made(tmp_path / "x", {"a": number}).digest for number in range(4)]
    kept = [tmp_path / f"x.previous{end}" for end in ("", "-2", "-3")]
    assert [Artifact(path).digest for path in [*kept, tmp_path / "x"]] == digests


def refuse(_):
    raise InputError("refused")


def refuse_later(draft: Draft):
    (draft.directory / "half").write_text("half")
    raise InputError("refused")


@pytest.mark.parametrize(("fill", "cheap"), [(refuse, False), (refuse, True), (refuse_later, True)])
def test_what_was_finished_is_put_back_if_the_new_is_refused(tmp_path, fill, cheap):
    old = made(tmp_path / "x").digest
    with pytest.raises(InputError, match="refused"):
        Stage("numbers", 1, {"a": 2}, {}, cheap=cheap).make(tmp_path / "x", fill)
    assert Artifact(tmp_path / "x").digest == old
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_work_that_was_begun_is_kept_beside_what_was_finished(tmp_path):
    old = made(tmp_path / "x").digest
    with pytest.raises(InputError, match="refused"):
        made(tmp_path / "x", {"a": 2}, make=refuse_later)
    assert Artifact(tmp_path / "x.previous").digest == old
    assert (tmp_path / "x" / "half").exists()


def test_interrupted_work_is_not_an_artifact_and_resumes(tmp_path):
    def interrupted(draft):
        (draft.directory / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "x", make=interrupted)
    with pytest.raises(InputError, match="unfinished"):
        Artifact(tmp_path / "x")

    def resumed(draft):
        assert (draft.directory / "half").exists()
        return make(draft)

    made(tmp_path / "x", make=resumed)
    assert not (tmp_path / "x" / "unfinished.json").exists()


def test_unfinished_work_of_other_settings_is_refused_until_told(tmp_path):
    with pytest.raises(AssertionError):
        made(tmp_path / "x", make=fail)
    with pytest.raises(InputError, match=r"settings.a: 1 -> 2.*--restart"):
        made(tmp_path / "x", {"a": 2})
    assert made(tmp_path / "x", {"a": 2}, restart=True).settings == {"a": 2}


def test_cheap_work_of_other_settings_is_begun_again(tmp_path):
    with pytest.raises(AssertionError):
        made(tmp_path / "x", make=fail)
    assert Stage("numbers", 1, {"a": 2}, {}, cheap=True).make(tmp_path / "x", make).settings == {"a": 2}


def test_scratch_is_there_until_the_manifest_is(tmp_path, monkeypatch):
    def with_scratch(draft):
        draft.scratch("journal").write_text("how far")
        return make(draft)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Draft, "finish", full_disk)
        with pytest.raises(OSError, match="No space"):
            made(tmp_path / "x", make=with_scratch)
    assert (tmp_path / "x" / "journal").exists()
    made(tmp_path / "x", make=with_scratch)
    assert not (tmp_path / "x" / "journal").exists()


def test_scratch_that_a_kill_left_is_removed_later(tmp_path, monkeypatch):
    def with_scratch(draft):
        draft.scratch("work").mkdir()
        return make(draft)

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("spalm.artifact._remove", killed)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "x", make=with_scratch)
    assert (tmp_path / "x" / "work").exists()
    made(tmp_path / "x", make=fail)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["SHA256SUMS", "manifest.json", "numbers"]


def test_a_full_disk_at_the_first_file_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    def full_disk(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full_disk)
        with pytest.raises(OSError, match="No space"):
            made(tmp_path / "x")
    made(tmp_path / "x")


def test_foreign_files_are_not_touched(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"thesis.txt"):
        made(tmp_path / "x", restart=True)
    assert (tmp_path / "x" / "thesis.txt").read_text() == "mine"


def test_truncation_and_damage_are_found(tmp_path):
    found = made(tmp_path / "x")
    path = tmp_path / "x" / "numbers"
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-4])
    with pytest.raises(InputError, match="has 24 bytes, its manifest says 28"):
        Artifact(tmp_path / "x")
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="digest"):
        found.verify()
    for nonsense in ("{", "[]", "{}", '{"kind": 1, "settings": 2, "facts": 3}'):
        (tmp_path / "x" / "manifest.json").write_text(nonsense)
        with pytest.raises(InputError, match="damaged"):
            Artifact(tmp_path / "x")


def test_another_kind_is_refused(tmp_path):
    made(tmp_path / "x")
    with pytest.raises(InputError, match="holds a numbers, a corpus is needed"):
        Artifact(tmp_path / "x", "corpus")


def test_a_second_writer_is_refused(tmp_path):
    def slow(draft):
        (draft.directory / "started").touch()
        time.sleep(20)

    writer = multiprocessing.get_context("fork").Process(target=lambda: made(tmp_path / "x", make=slow))
    writer.start()
    try:
        while not (tmp_path / "x" / "started").exists():
            time.sleep(0.01)
        with pytest.raises(InputError, match="another process"):
            made(tmp_path / "x")
    finally:
        writer.kill()
        writer.join()
    made(tmp_path / "x")  # a dead writer holds nothing


def test_the_manifest_is_the_documented_one(tmp_path):
    made(tmp_path / "x")
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert set(manifest) == {"kind", "version", "settings", "parents", "facts", "files", "spalm"}
    assert set(manifest["files"]["numbers"]) == {"bytes", "sha256", "dtype", "shape"}


def test_a_setting_that_came_later_and_is_not_used_changes_nothing(tmp_path):
    old = made(tmp_path / "x", {"a": 1})
    assert made(tmp_path / "x", {"a": 1, "later": None}, make=fail).digest == old.digest
    assert made(tmp_path / "x", {"a": 1, "later": 3}).settings == {"a": 1, "later": 3}
