"""Links and folders in what somebody else sent: nothing elsewhere is removed, read or copied."""

import inspect
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spalm.attachment.attached import base_folder
from spalm.corpus import Corpus
from spalm.errors import DamagedError, InputError
from spalm.generation.hugging_face.export import copy_model
from spalm.maintenance import forget_with_receipt, remove_forgotten, verify_directory
from spalm.memory import Memory


@pytest.fixture
def copy(run_folder, tmp_path) -> Path:
    return shutil.copytree(run_folder, tmp_path / "run")


@pytest.fixture
def pictures(tmp_path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "below").mkdir(parents=True)
    for name in ("cat.png", "list.json", "SHA256SUMS", "below/table.csv"):
        (folder / name).write_text("mine")
    return folder


@pytest.fixture
def few_frames() -> Iterator[None]:
    """What calls itself for each of hundreds of folders within one another ends in a RecursionError."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 200)
    yield
    sys.setrecursionlimit(usual)


def names_of(folder: Path) -> list[str]:
    return Corpus(folder / "corpus").split("train").names


@pytest.mark.parametrize("place", ["study", "report", "index-2", "corpus/notes", "study/test/mine"])
def test_nothing_is_removed_through_a_link(copy, pictures, place):
    shutil.rmtree(copy / place, ignore_errors=True)
    (copy / place).parent.mkdir(parents=True, exist_ok=True)
    (copy / place).symlink_to(pictures)
    before = sorted(pictures.rglob("*"))
    Memory(copy / "memory").forget(names_of(copy)[:1])
    for use in (lambda: remove_forgotten(copy), lambda: forget_with_receipt(copy, names_of(copy)[1:2])):
        with pytest.raises(InputError, match="is a symbolic link that leads out of"):
            use()
    assert sorted(pictures.rglob("*")) == before


@pytest.mark.parametrize("place", ["study", "report"])
def test_a_stage_elsewhere_is_not_an_analysis(copy, run_folder, tmp_path, place):
    stage = shutil.copytree(run_folder / "corpus", tmp_path / "other")
    shutil.rmtree(copy / place, ignore_errors=True)
    (copy / place).symlink_to(stage)
    Memory(copy / "memory").forget(names_of(copy)[:1])
    assert remove_forgotten(copy)[0]
    assert not verify_directory(stage).damaged


def test_a_memory_on_another_disk_is_verified_and_others_folders_are_not(copy, pictures, tmp_path):
    (copy / "memory").rename(tmp_path / "disk")
    (copy / "memory").symlink_to(tmp_path / "disk")
    (copy / "notes").symlink_to(pictures)
    (copy / "everything").symlink_to("/")
    found = verify_directory(copy)
    assert not found.damaged
    assert found.unchecked == [copy / "everything", copy / "notes"]
    shard = next((tmp_path / "disk" / "shards").glob("*.tokens"))
    shard.write_bytes(bytes(shard.stat().st_size))
    assert [line for line in verify_directory(copy).damaged if shard.name in line]


@pytest.mark.usefixtures("few_frames")
def test_folders_within_one_another_without_end(copy):
    inner = copy / "notes"
    for _ in range(250):
        inner.mkdir()
        inner = inner / "a"
    assert not verify_directory(copy).damaged
    with pytest.raises(InputError, match="more than 100 folders within one another"):
        remove_forgotten(copy)
    (copy / "notes").rename(copy / "memory" / "notes")
    assert "more than 100 folders within one another" in verify_directory(copy).damaged[0]


def test_a_copy_for_others_has_nothing_that_a_link_leads_to(copy, pictures, tmp_path):
    (copy / "corpus" / "notes").symlink_to(pictures / "cat.png")
    with pytest.raises(InputError, match="notes is a symbolic link that leads out of"):
        copy_model(copy, tmp_path / "public", {})
    assert not (tmp_path / "public").exists()
    (copy / "corpus" / "notes").unlink()
    copy_model(copy, tmp_path / "public", {})
    assert (tmp_path / "public" / "results.json").exists()


def test_a_model_folder_that_leads_to_itself_is_told_in_a_line(attached_folder, tmp_path):
    folder = shutil.copytree(attached_folder, tmp_path / "attached")
    shutil.rmtree(folder / "model", ignore_errors=True)
    (folder / "model").symlink_to("model")
    with pytest.raises(DamagedError, match="names a model outside of the folder"):
        base_folder(folder, "model")


def test_a_receipt_does_not_read_a_hole(copy):
    name = Memory(copy / "memory").entries().live_documents.names[0]
    with (copy / "hole").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedError, match="hole"):
        forget_with_receipt(copy, [name])
    assert name in Memory(copy / "memory").entries().live_documents.names, "nothing was forgotten"
