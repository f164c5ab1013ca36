"""Copies of a folder of a model with a memory: whole wherever they are, and what they are refused over."""

import shutil

import pytest
from torch.testing import assert_close

from spalm.artifact import only_writer
from spalm.errors import InputError
from spalm.memory import Memory
from support.model_folders import TEXTS, moved_in, rewrite

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, AutoTokenizer

from spalm.generation.hugging_face.model import SpalmForCausalLM


def test_a_copy_opens_elsewhere_when_the_original_is_gone(both, tmp_path):
    model, tokenizer = both
    ids = tokenizer(TEXTS[0], return_tensors="pt")
    source = moved_in(model.directory, tmp_path / "original")
    original = AutoModelForCausalLM.from_pretrained(source)
    (source / "half.tmp").write_text("half-made")
    (source / "memory.previous").mkdir()
    original.save_pretrained(tmp_path / "copy")
    expected = original(**ids).logits
    shutil.rmtree(tmp_path / "original")
    shutil.move(tmp_path / "copy", tmp_path / "elsewhere")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere")
    assert_close(found(**ids).logits, expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "elsewhere")(TEXTS[0]).input_ids == ids.input_ids[0].tolist()
    assert not [path for path in (tmp_path / "elsewhere").rglob("*") if path.suffix in (".tmp", ".previous")]
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_base_within_the_folder_is_copied_with_it(model, tokenizer, tmp_path):
    source = moved_in(model.directory, tmp_path / "original")
    shutil.move(tmp_path / "original" / "base", source / "within")
    rewrite(source / "attached.json", model=str(source / "within"))
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "copy")
    shutil.rmtree(tmp_path / "original")
    ids = tokenizer(TEXTS[0], return_tensors="pt")
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "copy")(**ids).logits, model(**ids).logits)


def test_a_copy_over_an_older_one_mixes_nothing(model, tokenizer, tmp_path):
    source = moved_in(model.directory, tmp_path / "original")
    original = AutoModelForCausalLM.from_pretrained(source)
    target = tmp_path / "copy"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    original.save_pretrained(target)
    memory = Memory(source / "memory")
    memory.forget(["doc1.txt", "doc2.txt"])
    memory.compact()
    original.save_pretrained(target)
    files = {path.name: path.read_bytes() for path in (source / "memory").rglob("*") if path.is_file()}
    assert {path.name: path.read_bytes() for path in (target / "memory").rglob("*") if path.is_file()} == files
    assert Memory(target / "memory").digest == memory.digest
    ids = tokenizer(TEXTS[0], return_tensors="pt")
    assert_close(AutoModelForCausalLM.from_pretrained(target)(**ids).logits, original(**ids).logits)
    assert (target / "notes.txt").read_text() == "mine"


def test_a_copy_onto_itself_or_into_itself_is_refused(both):
    model, _ = both
    before = sorted(model.directory.rglob("*"))
    for folder in (model.directory, model.directory / "copy", model.directory.parent):
        with pytest.raises(InputError, match="give a folder that is apart from it"):
            model.save_pretrained(folder)
    assert sorted(model.directory.rglob("*")) == before


def test_a_copy_over_another_model_is_refused(model, own_model, tmp_path):
    own_model.save_pretrained(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in ("run", "file"):
        with pytest.raises(InputError, match="is a file, or holds another model; give another folder"):
            model.save_pretrained(tmp_path / name)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_copy_is_refused_while_the_memory_is_written(model, tmp_path):
    with (
        only_writer(model.memory_model.store.directory),
        pytest.raises(InputError, match="is being written by another"),
    ):
        model.save_pretrained(tmp_path / "copy")
    assert not list(tmp_path.iterdir())


def test_a_copy_keeps_the_model_that_was_chosen(finished, tmp_path):
    SpalmForCausalLM.from_pretrained(finished.directory, model="knn-lm").save_pretrained(tmp_path / "copy")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "copy").memory_model.name == "copy/knn-lm"
