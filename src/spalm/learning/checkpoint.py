"""Checkpoints: everything that the next step depends on, so that resuming equals never having stopped, bit for bit.

    checkpoint/STEP/tensors.safetensors     parameters, optimiser moments, carried memories, random state
    checkpoint/STEP/progress.json           step, best dev loss, and the digest of the tensors

Tensors and JSON only: loading one runs no code. The newest whole one counts; a half-written one is never seen.
"""

import errno
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spalm.artifact import digest_of_file, write_json
from spalm.errors import InputError

FOLDER = "checkpoint"


@dataclass
class Progress:
    """How far training has come."""

    step: int = 0
    best_dev: float | None = None
    best_step: int | None = None


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file in one step: it is there whole, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from None
    temporary.replace(path)


def load_parameters(model: nn.Module, path: Path) -> None:
    """Fills a model from a safetensors file, refusing one that was made for another network."""
    try:
        tensors = load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise InputError(f"{path} cannot be read ({error}); train the model again") from None
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


def save(
    directory: Path,
    progress: Progress,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    memories: list[list[Tensor]],
) -> None:
    folder = directory / FOLDER / f"{progress.step:09d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for index, moments in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser/{index}/{name}": tensor for name, tensor in moments.items()}
    for part, memory in enumerate(memories):
        tensors |= {f"memory/{part}/{layer}": tensor for layer, tensor in enumerate(memory)}
    tensors |= {f"random/{device}": state for device, state in _random_states().items()}
    save_tensors(folder / "tensors.safetensors", tensors)
    digest = digest_of_file(folder / "tensors.safetensors")
    write_json(folder / "progress.json", {**asdict(progress), "sha256": digest})
    for older in sorted((directory / FOLDER).iterdir()):
        if older != folder:
            shutil.rmtree(older)


def load(
    directory: Path, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device, begin: int = 0
) -> tuple[Progress, list[list[Tensor]]]:
    """Brings model, optimiser and random state to the newest checkpoint; without one, leaves them at step `begin`."""
    folder = _newest(directory)
    if folder is None:
        return Progress(begin), []
    content = json.loads((folder / "progress.json").read_text())
    path = folder / "tensors.safetensors"
    if digest_of_file(path) != content.pop("sha256"):
        raise InputError(f"{path} is damaged; give --restart to train from the beginning")
    tensors = load_file(path)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, inner = name.split("/", 1)
        groups.setdefault(group, {})[inner] = tensor
    model.load_state_dict(groups["model"])
    state = optimiser.state_dict()
    for name, tensor in groups.get("optimiser", {}).items():
        index, moment = name.split("/")
        state["state"].setdefault(int(index), {})[moment] = tensor
    optimiser.load_state_dict(state)
    _restore_random_states(groups["random"])
    memories: dict[int, dict[int, Tensor]] = {}
    for name, tensor in groups.get("memory", {}).items():
        part, layer = map(int, name.split("/"))
        memories.setdefault(part, {})[layer] = tensor.to(device)
    return Progress(**content), [[layers[i] for i in sorted(layers)] for _, layers in sorted(memories.items())]


def _newest(directory: Path) -> Path | None:
    whole = sorted(path.parent for path in (directory / FOLDER).glob("*/progress.json"))
    return whole[-1] if whole else None


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
