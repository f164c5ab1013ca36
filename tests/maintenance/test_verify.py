"""`spalm verify` finds every flipped bit in every file of a run and of a model with a memory."""

import shutil
from pathlib import Path

import pytest

from spalm.api import load
from spalm.compute import Execution, Hardware
from spalm.digests import SUMS
from spalm.errors import InputError
from spalm.maintenance import verify_directory
from support.commands import refused, spalm


def test_a_file_that_is_missing_is_found(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    for name in ("results.json", "transformer/metrics.jsonl", "memory/memory.json", "index/lists", "corpus/dev.names"):
        (folder / name).rename(tmp_path / "away")
        assert verify_directory(folder).damaged, name
        (tmp_path / "away").rename(folder / name)
    assert not verify_directory(folder).damaged


def test_what_an_earlier_version_made_is_verified_as_far_as_it_can_be(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    for path in folder.rglob(SUMS):
        path.unlink()
    found = verify_directory(folder)
    assert not found.damaged
    names = {str(path.relative_to(folder)) for path in found.unchecked}
    assert {"results.json", "transformer/metrics.jsonl", "corpus/manifest.json", "index/lists"} <= names
    assert "corpus/dev.tokens" not in names
    assert "could not be checked, because no digest of them was kept" in found.summary()
    (folder / "corpus" / "dev.tokens").write_bytes(bytes((folder / "corpus" / "dev.tokens").stat().st_size))
    assert len(verify_directory(folder).damaged) == 1


def test_a_kill_just_before_the_description_is_written_is_not_damage(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    stage, index = folder / "transformer", folder / "index"
    (stage / "manifest.json").rename(stage / "unfinished.json")
    (index / "index.json").unlink()
    (index / "work-0123456789abcdef").mkdir()
    found = verify_directory(folder)
    assert not found.damaged
    assert {stage / SUMS, stage / "model.safetensors", index / SUMS, index / "lists"} <= {*found.unchecked}
    (stage / "unfinished.json").unlink()
    (index / "work-0123456789abcdef").rmdir()
    assert [line.split(" is missing")[0] for line in verify_directory(folder).damaged] == [
        str(index / "index.json"),
        str(stage / "manifest.json"),
    ]


def test_the_command_says_it_in_a_line(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    assert "every byte is as it was written" in spalm("verify", folder).stderr
    path = folder / "recipe.yaml"
    path.write_text(path.read_text().replace("steps", "Steps", 1))
    assert "recipe.yaml is damaged (its digest differs)" in refused("verify", folder)
    assert "recipe.yaml is damaged (its digest differs)" in refused("study", folder)
    assert "no folder" in refused("verify", tmp_path / "nowhere")
    assert "nothing that spalm made" in refused("verify", Path(__file__).parent)


def test_a_base_model_that_changed_is_refused(attached_copy, tmp_path):
    folder = shutil.copytree(attached_copy, tmp_path / "attached")
    execution = Execution(Hardware("cpu", 1))
    load(folder, execution=execution)
    path = folder / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is not the model that .* was made with: its files have changed"):
        load(folder, execution=execution)
    assert any("model.safetensors" in line for line in verify_directory(folder).damaged)
