"""Commands whose work is done by a real cluster of two nodes, and clusters that cannot be reached."""

import json
import shutil
import socket
import time
from pathlib import Path

import pytest

from spalm.compute import ray_engine as on_ray
from spalm.errors import InputError
from spalm.memory import Memory
from support.commands import RANK, SMALL_RECIPE, SMALL_SETTINGS, refused, script, spalm, torchrun
from support.ray_clusters import contents, table_bytes, two_nodes

pytestmark = pytest.mark.slow

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as made:
        yield made


def test_the_command_on_a_cluster(cluster, text_folder, tmp_path):
    def command(out: Path, *more) -> str:
        about = [*SMALL_SETTINGS, f"corpus.source.path={text_folder}", "--out", out, "--ram", "1G", *more]
        found = spalm("neighbours", *about, RAY_ADDRESS="")
        assert found.returncode == 0, found.stderr
        return found.stderr

    command(tmp_path / "here")
    kept = shutil.ignore_patterns("memory", "neighbours")
    shutil.copytree(tmp_path / "here", tmp_path / "there", ignore=kept)
    said = command(tmp_path / "there", "--engine", "ray", "--address", cluster.address)
    assert "on 2 core(s) of 2 machines" in said
    assert "INFO" not in said
    assert contents(Memory(tmp_path / "here" / "memory")) == contents(Memory(tmp_path / "there" / "memory"))
    assert table_bytes(tmp_path / "there" / "neighbours") == table_bytes(tmp_path / "here" / "neighbours")


def test_ranks_train_and_the_cluster_searches(cluster, text_folder, tmp_path):
    """A whole run under torchrun: of its ranks, the first alone asks the cluster."""
    (tmp_path / "small.yaml").write_text(SMALL_RECIPE.replace("PATH", str(text_folder)))
    (tmp_path / "command.py").write_text(RANK)
    small = ("training.steps=10", "evaluation.memory_lengths=[8]")
    run = [tmp_path / "command.py", "run", tmp_path / "small.yaml", *small, "--out", tmp_path / "run"]
    where = ("--device", "cpu", "--ram", "1G", "--engine", "ray", "--address", cluster.address)
    found = torchrun(2, *run, *where, RAY_ADDRESS="")
    assert found.returncode == 0, found.stderr
    assert "on 2 core(s) of 2 machines" in found.stderr
    rows = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {"transformer", "transformer-xl", "knn-lm", "spalm"} <= {row["model"] for row in rows}


def test_a_pretrained_model_remembers_on_a_cluster(cluster, attached_folder, tmp_path):
    """The same keys: with either engine a memory that is made later is the same."""
    (tmp_path / "more.txt").write_text("the captain of the red boat found the old map . " * 30)
    held = []
    for name, how in (("here", []), ("there", ["--engine", "ray", "--address", cluster.address])):
        shutil.copytree(attached_folder, tmp_path / name)
        found = spalm("remember", tmp_path / name, "--text", tmp_path / "more.txt", *how)
        assert found.returncode == 0, found.stderr
        held.append(contents(Memory(tmp_path / name / "memory")))
    assert held[0] == held[1]


def test_a_wrong_address_is_one_line_and_soon(tmp_path, monkeypatch):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        began = time.monotonic()
        said = refused("neighbours", "demo", "--out", tmp_path, "--engine", "ray", "--address", address)
        assert f"--address {address}: nothing answers there" in said
        assert time.monotonic() - began < 30
        deaf.listen()
        monkeypatch.setattr(on_ray, "_ANSWER_SECONDS", 4)
        with pytest.raises(InputError, match="no Ray cluster answers there, or none of this version"):
            on_ray._refuse_unless_answered(address)
    for wrong in ("nowhere", "a:b", ":1", "localhost:99999999"):
        with pytest.raises(InputError, match=f"--address {wrong}: "):
            on_ray._refuse_unless_answered(wrong)
    said = refused("remember", "demo", "--out", tmp_path, "--address", "auto")
    assert "the local engine has none; give --engine ray too" in said


def test_a_missing_extra_is_one_line(tmp_path):
    path = tmp_path / "without.py"
    path.write_text("import sys; sys.modules['ray'] = None; from spalm.cli import main; main()")
    found = script(path, "run", "demo", "--out", tmp_path / "run", "--engine", "ray").ended()
    assert found.returncode == 1
    assert found.stderr == "spalm: the engine ray needs its library: pip install 'spalm[ray]'\n"
