"""The loop that any of our models trains in: contiguous streams, carried memories, resumable at any step."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor, nn

from spalm.console import bar
from spalm.corpus import Batch, Streams, TokenSplit
from spalm.errors import InputError
from spalm.learning import checkpoint
from spalm.learning.device import Hardware, autocast
from spalm.learning.optimiser import OptimiserSettings, learning_rate, make_optimiser
from spalm.learning.runlog import RunLog
from spalm.settings import Settings


class TrainingSettings(Settings):
    steps: int = Field(gt=0)
    """Optimiser steps."""
    batch_size: int = Field(gt=0)
    """Lanes: places of the text that are read side by side; one step reads a segment of each."""
    micro_batch: int | None = Field(None, gt=0)
    """Lanes computed at a time; gradients of a step are added up over them. Saves memory, changes nothing else."""
    segment_length: int = Field(gt=0)
    """Tokens of local context: the paper's N."""
    memory_length: int = Field(ge=0)
    """Short-term memory of transformer-XL in training: the paper's M. The vanilla transformer has none."""
    optimiser: OptimiserSettings
    """Adam and its schedule."""
    evaluate_every: int = Field(gt=0)
    """Steps between looks at the dev split; the best model on it is the one that is kept."""
    dev_tokens: int | None = Field(None, gt=0)
    """Look only at this many first tokens of dev, to save time; the final evaluation always reads all of it."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe; for GPUs."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of the parameters, the order of the text and the dropout."""


CHECKPOINT_SECONDS = 30.0
BEST = "model.safetensors"
KEPT = "kept.safetensors"
"""The parameters after some of the steps."""

Loss = Callable[[Batch, list[Tensor]], tuple[Tensor, list[Tensor]]]
"""The summed loss of a batch given the lanes' memory, and the memory after it."""


def fit(
    model: nn.Module,
    loss: Loss,
    train: TokenSplit,
    dev_loss: Callable[[], float],
    settings: TrainingSettings,
    directory: Path,
    title: str,
    hardware: Hardware,
    tensorboard: bool = False,
    begin: int = 0,
    keep: int | None = None,
) -> checkpoint.Progress:
    """Trains `model`, leaving the best on dev in `directory`; continues from the checkpoint there, if there is one.

    `begin`: the step of the schedule at which it takes over, where another model has made those before. `keep`: the
    number of steps after which the parameters are kept for another model to take over.
    """
    device = hardware.prepare()
    model.to(device)
    streams = Streams(train, settings.batch_size, settings.segment_length, settings.seed)
    optimiser = make_optimiser(settings.optimiser, model)
    torch.manual_seed(settings.seed + 1)  # of the dropout; the parameters were drawn before
    progress, memories = checkpoint.load(directory, model, optimiser, device, begin)
    log = RunLog(directory, progress.step, tensorboard)
    compute = torch.compile(loss) if hardware.compile else loss
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
            batch = streams.batch(progress.step).to(device)
            with autocast(device, settings.bf16):
                train_loss, memories = _accumulate(compute, batch, memories, settings)
            norm = nn.utils.clip_grad_norm_(model.parameters(), settings.optimiser.clip)
            if not math.isfinite(train_loss) or not torch.isfinite(norm):
                raise InputError(
                    f"{title}: the loss is no longer a number at step {progress.step} (learning rate {rate:.2g}); "
                    "lower training.optimiser.learning_rate or lengthen its warm_up, and give --restart"
                )
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            progress.step += 1
            shown.advance()
            if progress.step == keep:
                checkpoint.save_tensors(directory / KEPT, model.state_dict())

            now = time.monotonic()
            last = progress.step == settings.steps
            if last or progress.step % 10 == 0:
                speed = tokens_per_step * (progress.step - logged_step) / max(now - logged, 1e-9)
                logged, logged_step = now, progress.step
                log.write(progress.step, loss=train_loss, learning_rate=rate, tokens_per_second=round(speed))
            if last or progress.step % settings.evaluate_every == 0:
                found = dev_loss()
                log.write(progress.step, dev_loss=found)
                if progress.best_dev is None or found < progress.best_dev:
                    progress.best_dev, progress.best_step = found, progress.step
                    checkpoint.save_tensors(directory / BEST, model.state_dict())
            dev = "" if progress.best_dev is None else f", dev {progress.best_dev:.3f}"
            shown.say(f"loss {train_loss:.3f}{dev}, {speed:,.0f} tokens/s")
            if last or now - saved > max(CHECKPOINT_SECONDS, 20 * save_seconds):  # at most a twentieth of the time
                began = time.monotonic()
                checkpoint.save(directory, progress, model, optimiser, memories)
                saved = time.monotonic()
                save_seconds = saved - began
    log.close()
    return progress


def _accumulate(
    loss: Loss, batch: Batch, memories: list[list[Tensor]], settings: TrainingSettings
) -> tuple[float, list[list[Tensor]]]:
    """Adds up the gradients of one step, part by part; gives the mean loss and the memories after it."""
    at_a_time = min(settings.micro_batch or settings.batch_size, settings.batch_size)
    tokens = batch.targets.numel()
    total, after = 0.0, []
    for part, first in enumerate(range(0, settings.batch_size, at_a_time)):
        summed, memory = loss(batch.lanes(first, first + at_a_time), memories[part] if memories else [])
        (summed / tokens).backward()
        total += summed.item()
        after.append(memory)
    return total / tokens, after
