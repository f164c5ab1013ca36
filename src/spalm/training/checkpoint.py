"""Checkpoints: everything that the next step depends on, so that resuming equals never having stopped, bit for bit.

    checkpoint/STEP/tensors.safetensors     parameters, optimiser moments, carried memories, random state
    checkpoint/STEP/progress.json           step, best dev loss, and the digest of the tensors

Parameters are full and memories those of all lanes, so that another number of ranks can continue. A checkpoint
is tensors and JSON only: loading it runs no code. The newest complete checkpoint counts; a half-written one is ignored.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spalm.compute.ranks import SINGLE_RANK, Ranks
from spalm.digests import digest_of_file
from spalm.errors import DamagedError, InputError, first_line
from spalm.files import read_json, replacing, write_json
from spalm.training.replica import full_tensor, shard_like

_ModuleType = TypeVar("_ModuleType", bound=nn.Module)
CHECKPOINTS = "checkpoint"
"""Name of the folder of checkpoints in a model's directory."""


@dataclass
class Progress:
    """Progress of training."""

    step: int = 0
    """Number of steps done."""
    best_dev: float | None = None
    """Lowest mean loss on dev so far."""
    best_step: int | None = None
    """Number of steps after which the lowest loss was measured."""


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file in one step: after a crash it is complete or not there."""
    try:
        with replacing(path) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from None


@torch.random.fork_rng(devices=[])
def load_network(make: Callable[[], _ModuleType], path: Path) -> _ModuleType:
    """Returns a new network with the parameters of a safetensors file; raises an error if they are another network's.

    The parameters that a network is made with use random numbers. Those of the caller, who may be sampling with a
    seed, stay as they were.
    """
    model = make()
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DamagedError(f"{path} cannot be read ({first_line(error)}); train the model again") from None
    own = model.state_dict()
    for name in sorted({*own, *tensors}):
        mine, theirs = own.get(name), tensors.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            shapes = [None if tensor is None else list(tensor.shape) for tensor in (theirs, mine)]
            raise InputError(
                f"{path} was made with other settings: {name} is {shapes[0]} there and {shapes[1]} here; "
                "use the settings it was made with, or train the model again"
            )
    model.load_state_dict(tensors)
    return model


def save_checkpoint(
    directory: Path,
    progress: Progress,
    model: nn.Module,
    *,
    optimiser: torch.optim.Optimizer,
    memories: list[list[Tensor]],
    ranks: Ranks = SINGLE_RANK,
) -> None:
    """Writes a checkpoint: the first rank writes, and the others send it what only they have.

    `memories` holds each micro-batch's carried memory, layer by layer.
    """
    own = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for index, moments in optimiser.state_dict()["state"].items():
        own |= {f"optimiser/{index}/{name}": tensor for name, tensor in moments.items()}
    tensors = {}
    for name, tensor in own.items():
        full = full_tensor(tensor)
        if ranks.is_first:
            tensors[name] = full
    for part, memory in enumerate(memories):
        for layer, tensor in enumerate(memory):
            for rank, theirs in enumerate(ranks.gather(tensor)):
                tensors[f"memory/{rank * len(memories) + part}/{layer}"] = theirs
    for device, state in _random_states().items():
        tensors |= {
            f"random/{_random_state_name(device, rank)}": theirs for rank, theirs in enumerate(ranks.gather(state))
        }
    if ranks.is_first:
        _write(directory, progress, tensors)


def _write(directory: Path, progress: Progress, tensors: dict[str, Tensor]) -> None:
    """Writes the files of a checkpoint, then removes older checkpoints."""
    folder = directory / CHECKPOINTS / f"{progress.step:09d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_tensors(folder / "tensors.safetensors", tensors)
    digest = digest_of_file(folder / "tensors.safetensors")
    write_json(folder / "progress.json", {**asdict(progress), "sha256": digest})
    for older in sorted((directory / CHECKPOINTS).iterdir()):
        if older != folder:
            shutil.rmtree(older)


def load_checkpoint(
    directory: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    *,
    device: torch.device,
    first_step: int = 0,
    ranks: Ranks = SINGLE_RANK,
) -> tuple[Progress, list[Tensor]]:
    """Restores model, optimiser and random state from the newest checkpoint; without one, leaves them as they are.

    Returns the progress, which without a checkpoint is `first_step`, and the carried memory of this rank's lanes, layer
    by layer.
    """
    folder = _newest(directory)
    if folder is None:
        return Progress(first_step), []
    content = read_json(folder / "progress.json", dict, remedy="give --restart to train from the beginning")
    path = folder / "tensors.safetensors"
    if digest_of_file(path) != content.pop("sha256", None):
        raise InputError(f"{path} is damaged; give --restart to train from the beginning")
    tensors = load_file(path)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, inner = name.split("/", 1)
        groups.setdefault(group, {})[inner] = tensor
    own = model.state_dict()
    model.load_state_dict({name: shard_like(tensor, own[name]) for name, tensor in groups["model"].items()})
    state = optimiser.state_dict()
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for name, tensor in groups.get("optimiser", {}).items():
        index, moment = name.split("/")
        like = parameters[int(index)]
        state["state"].setdefault(int(index), {})[moment] = shard_like(tensor, like) if tensor.dim() else tensor
    optimiser.load_state_dict(state)
    _restore_random_states(groups["random"], ranks.rank)
    return Progress(**content), [lanes.to(device) for lanes in _own_lanes(groups.get("memory", {}), ranks)]


def _own_lanes(memories: dict[str, Tensor], ranks: Ranks) -> list[Tensor]:
    """Returns the carried memory of this rank's lanes by layer, however many ranks and micro-batches wrote it."""
    layers: dict[int, dict[int, Tensor]] = {}
    for name, tensor in memories.items():
        part, layer = map(int, name.split("/"))
        layers.setdefault(layer, {})[part] = tensor
    joined = [torch.cat([parts[part] for part in sorted(parts)]) for _, parts in sorted(layers.items())]
    shares = [ranks.own_lanes(len(lanes)) for lanes in joined]
    return [lanes[share.start : share.stop] for lanes, share in zip(joined, shares)]


def _newest(directory: Path) -> Path | None:
    """Returns the folder of the newest complete checkpoint; None if there is none."""
    complete = sorted(path.parent for path in (directory / CHECKPOINTS).glob("*/progress.json"))
    return complete[-1] if complete else None


def _random_states() -> dict[str, Tensor]:
    """Returns the present random state of each kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, Tensor], rank: int) -> None:
    """Restores the random state of this rank; if the checkpoint has none for it, the present state stays."""
    cpu, cuda = _random_state_name("cpu", rank), _random_state_name("cuda", rank)
    if cpu in states:
        torch.set_rng_state(states[cpu])
    if cuda in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[cuda])


def _random_state_name(device: str, rank: int) -> str:
    """Returns the name of a rank's random state in a checkpoint; the first rank's has no number."""
    return f"{device}/{rank}" if rank else device
