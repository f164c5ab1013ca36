"""The loop that any of our models trains in: contiguous streams, carried memories, resumable at any step."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor, nn

from spalm.compute import Execution, autocast
from spalm.console import bar
from spalm.corpus import Batch, TokenSplit, TrainingBatches
from spalm.errors import InputError
from spalm.settings import Settings
from spalm.training import checkpoint
from spalm.training.optimiser import OptimiserSettings, learning_rate, make_optimiser
from spalm.training.replica import Loss, Replica, whole
from spalm.training.run_log import RunLog


class TrainingSettings(Settings):
    steps: int = Field(gt=0)
    """Optimiser steps."""
    batch_size: int = Field(gt=0)
    """Lanes: places of the text that are read side by side; one step reads a segment of each."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Lanes that a rank computes at a time; gradients of a step are added up over them. Saves memory, nothing else."""
    segment_length: int = Field(gt=0)
    """Tokens of local context: the paper's N."""
    memory_length: int = Field(ge=0)
    """Short-term memory of transformer-XL in training: the paper's M. The vanilla transformer has none."""
    optimiser: OptimiserSettings
    """Adam and its schedule."""
    evaluate_every: int = Field(gt=0)
    """Steps between looks at the dev split; the best model on it is the one that is kept."""
    dev_tokens: int | None = Field(default=None, gt=0)
    """Look only at this many first tokens of dev, to save time; the final evaluation always reads all of it."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe; for GPUs."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the parameters, the order of the text and the dropout."""


CHECKPOINT_SECONDS = 30.0
BEST = "model.safetensors"
KEPT = "kept.safetensors"
"""The parameters after some of the steps."""


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, on what, and how it is judged."""

    title: str
    """Words of the progress bar."""
    model: nn.Module
    loss: Loss
    train: TokenSplit
    dev_loss: Callable[[], float]
    """Mean loss of the model on dev, as it is now."""
    settings: TrainingSettings
    begin: int = 0
    """Step of the schedule at which it takes over, where another model has made those before."""
    keep: int | None = None
    """Number of steps after which the parameters are kept, for another model to take over."""


def train(task: TrainingTask, directory: Path, execution: Execution) -> checkpoint.Progress:
    """Trains a model, leaving the best on dev in `directory`; continues from the checkpoint there, if there is one.

    Ranks share the lanes, so that a step is the same on any number of them; the first one looks at dev and writes.
    """
    settings, title, begin, hardware = task.settings, task.title, task.begin, execution.hardware
    device, ranks = hardware.prepare(all_ranks=True), hardware.ranks
    streams = TrainingBatches(
        task.train, settings.batch_size, settings.segment_length, settings.seed, ranks.own_lanes(settings.batch_size)
    )
    replica = Replica(task.model, task.loss, device, hardware)
    optimiser = make_optimiser(settings.optimiser, replica.model)

    def gradients(step: int, memories: list[list[Tensor]]) -> tuple[float, list[list[Tensor]]]:
        with autocast(device, bf16=settings.bf16):
            return _accumulate(replica.loss, streams.batch(step).to(device), memories, settings, replica.part)

    if ranks.distributed:
        # DDP settles the order in which it adds up gradients after a first pass. One that does not count comes before
        # all that do: the first step after a resume would be rounded otherwise.
        gradients(begin, [])
        optimiser.zero_grad(set_to_none=True)
    torch.manual_seed(settings.seed + 1 + ranks.rank)  # of the dropout; the parameters were drawn before
    progress, memory = checkpoint.load(directory, replica.model, optimiser, device, begin, ranks)
    ranks.refuse_unless_equal(
        progress.step, "checkpoints", "run the same command again when all machines see the same files"
    )
    memories = _in_parts(memory, settings)
    log = RunLog(directory, progress.step, tensorboard=execution.tensorboard) if ranks.is_first else None
    tokens_per_step = settings.batch_size * settings.segment_length
    saved = logged = time.monotonic()
    logged_step, save_seconds, speed = progress.step, 0.0, 0.0
    with bar(title, settings.steps, progress.step) as shown:
        while progress.step < settings.steps:
            rate = learning_rate(settings.optimiser, progress.step, settings.steps, begin)
            for group in optimiser.param_groups:
                group["lr"] = rate
            if streams.starts_epoch(progress.step):
                memories = []
            own_loss, memories = gradients(progress.step, memories)
            wait = max(CHECKPOINT_SECONDS, 20 * save_seconds)  # saving takes at most a twentieth of the time
            due = ranks.is_first and time.monotonic() - saved > wait  # clocks differ: one decides for all
            summed, to_save = ranks.sum(own_loss, due)
            train_loss = summed / ranks.world_size
            norm = whole(nn.utils.clip_grad_norm_(replica.model.parameters(), settings.optimiser.clip))
            if not math.isfinite(train_loss) or not torch.isfinite(norm):
                raise InputError(
                    f"{title}: the loss is no longer a number at step {progress.step} (learning rate {rate:.2g}); "
                    "lower training.optimiser.learning_rate or lengthen its warm_up, and give --restart"
                )
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            progress.step += 1
            shown.advance()
            if progress.step == task.keep:
                with replica.whole() as now_whole:
                    if ranks.is_first:
                        checkpoint.save_tensors(directory / KEPT, now_whole.state_dict())

            now = time.monotonic()
            last = progress.step == settings.steps
            if last or progress.step % 10 == 0:
                speed = tokens_per_step * (progress.step - logged_step) / max(now - logged, 1e-9)
                logged, logged_step = now, progress.step
                if log is not None:
                    log.write(progress.step, loss=train_loss, learning_rate=rate, tokens_per_second=round(speed))
            if last or progress.step % settings.evaluate_every == 0:
                with replica.whole() as now_whole:
                    found = ranks.broadcast(task.dev_loss() if ranks.is_first else None)
                    if log is not None:
                        log.write(progress.step, dev_loss=found)
                    if progress.best_dev is None or found < progress.best_dev:
                        progress.best_dev, progress.best_step = found, progress.step
                        if ranks.is_first:
                            checkpoint.save_tensors(directory / BEST, now_whole.state_dict())
            dev = "" if progress.best_dev is None else f", dev {progress.best_dev:.3f}"
            shown.say(f"loss {train_loss:.3f}{dev}, {speed:,.0f} tokens/s")
            if last or to_save:
                began = time.monotonic()
                checkpoint.save(directory, progress, replica.model, optimiser, memories, ranks)
                saved = time.monotonic()
                save_seconds = saved - began
    if log is not None:
        log.close()
    return progress


def _in_parts(lanes: list[Tensor], settings: TrainingSettings) -> list[list[Tensor]]:
    """What every layer holds of all lanes, as the memories of the parts that are computed at a time."""
    return [list(part) for part in zip(*(layer.split(settings.micro_batch or len(layer)) for layer in lanes))]


def _accumulate(
    loss: Callable[[Batch, list[Tensor]], tuple[Tensor, list[Tensor]]],
    batch: Batch,
    memories: list[list[Tensor]],
    settings: TrainingSettings,
    not_the_last: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[float, list[list[Tensor]]]:
    """Adds up the gradients of one step, part by part; gives the mean loss and the memories after it."""
    lanes, tokens = len(batch.targets), batch.targets.numel()
    at_a_time = min(settings.micro_batch or lanes, lanes)
    total, after = 0.0, []
    for part, first in enumerate(range(0, lanes, at_a_time)):
        with nullcontext() if first + at_a_time >= lanes else not_the_last():
            summed, memory = loss(batch.lanes(first, first + at_a_time), memories[part] if memories else [])
            (summed / tokens).backward()
        total += summed.item()
        after.append(memory)
    return total / tokens, after
