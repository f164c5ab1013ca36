"""Training under torchrun: as many ranks as one likes, the same losses; a rank is killed, and the run goes on."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from spalm.compute import Execution, Hardware, Ranks
from spalm.errors import InputError
from spalm.runs import Run, read_recipe
from spalm.training import replica
from support.commands import RANK, SMALL_RECIPE, torchrun
from support.small_texts import sentences

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = """
import os, signal, types
from spalm.corpus import TrainingBatches
from spalm.training import loop

loop.CHECKPOINT_SECONDS = 2
clock = types.SimpleNamespace(now=0, monotonic=lambda: clock.now)
loop.time = clock
read = TrainingBatches.batch

def batch(self, step):
    clock.now += 1
    if f"{os.environ['RANK']}:{step}" == os.environ.get("CRASH"):
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, step)

TrainingBatches.batch = batch
if "FOLDERS" in os.environ:
    os.chdir(os.path.join(os.environ["FOLDERS"], os.environ["RANK"]))
"""
"""spalm with a checkpoint every third step. If told to, a rank dies at a step, or each works in a folder of its own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A recipe, and the command to carry it out with."""
    folder = tmp_path_factory.mktemp("torchrun")
    texts = folder / "text"
    texts.mkdir()
    for index in range(12):
        (texts / f"story-{index}.txt").write_text(sentences(40, index))
    (folder / "small.yaml").write_text(SMALL_RECIPE.replace("PATH", str(texts)))
    (folder / "command.py").write_text(COMMAND + RANK)
    return folder


@pytest.fixture(scope="module")
def one(folder) -> Path:
    """What one process makes of the recipe."""
    alone(folder, "one", "spalm")
    return folder / "one"


@pytest.fixture
def begun(one, tmp_path) -> Path:
    """A run whose corpus is there already."""
    shutil.copytree(one / "corpus", tmp_path / "run" / "corpus")
    return tmp_path / "run"


def alone(folder: Path, out: Path | str, model: str, *settings: str) -> None:
    execution = Execution(Hardware("cpu", 1))
    Run(read_recipe(str(folder / "small.yaml"), list(settings)), folder / out, execution).network(model)


def command_of(folder: Path, model: str, out: Path) -> list[object]:
    return [folder / "command.py", "train", folder / "small.yaml", model, "--out", out, "--threads", 1]


def train(folder: Path, model: str, out: Path, *more: str, **variables: str) -> list[str]:
    """Trains on two ranks; what spalm itself says if that does not come to its end."""
    return said(torchrun(2, *command_of(folder, model, out), *more, **variables))


def said(found: subprocess.CompletedProcess) -> list[str]:
    lines = [line for line in found.stderr.splitlines() if line.startswith("spalm:")]
    assert bool(found.returncode) == bool(lines), found.stderr
    assert "src/spalm" not in found.stderr, "a traceback of ours"
    return lines


def losses(directory: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("dev_loss")) for line in lines]


def assert_same_losses(found: Path, expected: Path) -> None:
    for ours, theirs in zip(losses(found), losses(expected), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, nan_ok=True)


def test_two_ranks_have_the_losses_of_one(one, folder, tmp_path):
    """With torchrun as a user types it; the other tests have forks of a process that has loaded the libraries."""
    command = [*TORCHRUN, "-m", "spalm", *map(str, command_of(folder, "spalm", tmp_path)[1:])]
    assert said(subprocess.run(command, capture_output=True, text=True, timeout=120)) == []
    for model in ("transformer", "transformer-xl", "spalm"):
        assert_same_losses(tmp_path / model, one / model)
        assert json.loads((tmp_path / model / "manifest.json").read_text())["facts"]["best_step"] == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in one.iterdir())


def test_a_killed_rank_ends_the_run_and_the_next_goes_on(begun, folder, tmp_path):
    how = ("network.dropout=0.1", "training.micro_batch=1")
    assert train(folder, "transformer-xl", begun, *how) == []
    whole = begun / "transformer-xl"
    whole.rename(begun / "whole")
    (line,) = train(folder, "transformer-xl", begun, *how, CRASH="1:14")
    assert "another rank has ended" in line
    assert "run the same command again" in line
    assert [path.name for path in (whole / "checkpoint").iterdir()] == ["000000012"]
    shutil.copytree(begun, tmp_path / "copy")
    assert train(folder, "transformer-xl", begun, *how) == []
    assert losses(whole) == losses(begun / "whole")
    assert (whole / "manifest.json").read_bytes() == (begun / "whole" / "manifest.json").read_bytes()
    # Another number of ranks goes on too, with other dropout.
    alone(folder, tmp_path / "copy", "transformer-xl", *how)
    assert losses(tmp_path / "copy" / "transformer-xl")[:2] == losses(begun / "whole")[:2]


def test_a_divided_model_has_the_same_losses_and_goes_on_as_a_whole(one, begun, folder):
    (line,) = train(folder, "transformer-xl", begun, "--fsdp", CRASH="0:14")
    assert "another rank has ended" in line
    alone(folder, begun, "transformer-xl")
    assert_same_losses(begun / "transformer-xl", one / "transformer-xl")


def test_muon_needs_whole_matrices(begun, folder):
    (line,) = train(folder, "transformer-xl", begun, "--fsdp", "training.optimiser.kind=muon")
    assert line.endswith("training.optimiser.kind = muon: Muon needs whole matrices; train without --fsdp")


def test_ranks_that_see_different_data(one, folder, tmp_path):
    for rank in ("0", "1"):  # each stands in a folder of its own, and has its own corpus there
        shutil.copytree(one / "corpus", tmp_path / rank / "corpus")
    manifest = tmp_path / "1" / "corpus" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"spalm": "', '"spalm": "another '))
    (manifest.parent / "SHA256SUMS").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "corpus").symlink_to("/proc/self/cwd/corpus")
    (line,) = train(folder, "transformer", tmp_path / "run", FOLDERS=str(tmp_path))
    assert "ranks 0 and 1 have different data for transformer (corpus: " in line
    assert "start all with the same command, on the same files" in line


def two(act: Callable[[Ranks], Any]) -> list[Any]:
    """What two ranks, each a thread, come to: a result, or a refusal."""

    def outcome(each: Ranks) -> Any:
        try:
            return act(each)
        except InputError as error:
            return str(error)

    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(outcome, [Ranks(rank, 2, rank, 2, store) for rank in (0, 1)]))


def test_the_first_rank_tells_the_others():
    assert two(lambda each: [each.broadcast(f"{each.rank}, {turn}") for turn in (1, 2)]) == [["0, 1", "0, 2"]] * 2


def test_ranks_that_disagree():
    assert two(lambda each: each.refuse_unless_equal({"seed": 1}, "recipes", "start again")) == [None, None]
    expected = "ranks 0 and 1 have different recipes (training.seed: 0 -> 1); start again"
    assert (
        two(lambda each: each.refuse_unless_equal({"training": {"seed": each.rank}}, "recipes", "start again"))
        == [expected] * 2
    )


def test_a_folder_that_is_not_shared(tmp_path):
    assert two(lambda each: each.refuse_unless_shared(tmp_path / "run")) == [None, None]
    assert not list((tmp_path / "run").iterdir())
    for rank, line in enumerate(two(lambda each: each.refuse_unless_shared(tmp_path / str(each.rank)))):
        assert line.startswith(f"{tmp_path / str(rank)} is not shared: rank 1 does not see what rank 0 writes there")


def test_lanes_are_divided_evenly_or_not_at_all():
    assert [list(Ranks(rank, 3).own_lanes(6)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(InputError, match=r"training.batch_size = 4 cannot be divided among 3 ranks"):
        Ranks(1, 3).own_lanes(4)


def test_a_single_number_cannot_be_divided():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(()))
    with pytest.raises(InputError, match="--fsdp: weight is a single number"):
        replica.shard(model, torch.device("cpu"), 2)


def test_a_divided_model_needs_ranks():
    with pytest.raises(InputError, match=r"--fsdp.*torchrun --nproc-per-node"):
        Hardware("cpu", fsdp=True).prepare()
