"""The loop in which every model is trained: contiguous streams, carried memories, resumable at any step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from spalm.compute import Execution, has_bf16
from spalm.console import bar, say
from spalm.corpus import TokenSplit, TrainingBatches
from spalm.errors import InputError
from spalm.settings import Seed, Settings, added_since
from spalm.training import checkpoint
from spalm.training.gradients import GradientAccumulator, LaneMemories
from spalm.training.optimiser import OptimiserSettings, learning_rate, make_optimiser
from spalm.training.replica import Loss, Replica, full_tensor
from spalm.training.run_log import RunLog

CHECKPOINT_SECONDS = 30.0
"""Least number of seconds between checkpoints."""
BEST_FILE = "model.safetensors"
"""Name of the file with the parameters that were best on dev."""
KEPT_FILE = "kept.safetensors"
"""Name of the file with the parameters after `TrainingTask.keep_step` steps."""
_LOG_EVERY = 10
"""Steps between records of the training loss."""


class TrainingSettings(Settings):
    """Settings of one training run."""

    steps: int = Field(gt=0)
    """Number of optimiser steps."""
    batch_size: int = Field(gt=0)
    """Number of lanes: places of the text that are read side by side. One step reads a segment of each."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Lanes that a rank computes at a time; a step adds up their gradients. Saves memory and changes nothing else."""
    segment_length: int = Field(gt=0)
    """Tokens of local context: the paper's N."""
    memory_length: int = Field(ge=0)
    """Length of transformer-XL's short-term memory in training: the paper's M. The vanilla transformer has none."""
    optimiser: OptimiserSettings
    """Optimiser and its schedule."""
    evaluate_every: int = Field(gt=0)
    """Steps between evaluations on the dev split; the model that is best there is kept."""
    dev_tokens: int | None = Field(default=None, gt=0)
    """Number of first tokens of dev that are read during training, to save time; the final evaluation reads all."""
    dropout_from: int = added_since(0, ge=0)
    """First step with dropout: as long as every text is new, dropout only slows learning down."""
    bf16: Literal[True, False, "auto"] = False
    """Multiply matrices in bfloat16 where that is safe: faster on GPUs, and on CPUs with AVX512-BF16 or AMX. auto:
    there, and in float32 on other CPUs; then a run's last digits depend on the machine."""
    seed: Seed = 0
    """Seed of the initial parameters, of the order of the text and of dropout."""

    def in_bf16(self, device: torch.device) -> bool:
        """Returns whether to multiply matrices in bfloat16 on a device."""
        return (device.type != "cpu" or has_bf16()) if self.bf16 == "auto" else self.bf16


@dataclass(frozen=True)
class TrainingTask:
    """A model to train, with its text, its loss and its evaluation."""

    title: str
    """Label of the progress bar."""
    model: nn.Module
    """Model to train, with its initial parameters."""
    loss: Loss
    """Loss of the model on a batch."""
    train: TokenSplit
    """Text to train on."""
    dev_loss: Callable[[], float]
    """Returns the mean loss of the model on dev, with its present parameters."""
    settings: TrainingSettings
    """Settings of the run."""
    first_step: int = 0
    """Step of the schedule at which training begins, where another model has made the steps before."""
    keep_step: int | None = None
    """Number of steps after which the parameters are also kept, for another model to begin with."""


def train(task: TrainingTask, directory: Path, execution: Execution) -> checkpoint.Progress:
    """Trains a model and leaves the best parameters on dev in `directory`; continues from a checkpoint there.

    Ranks share the lanes, so that a step is the same on any number of them; the first rank evaluates and writes.
    """
    trainer = _Trainer(task, directory, execution)
    settings, progress = task.settings, trainer.progress
    meter = _SpeedMeter(progress.step, settings.batch_size * settings.segment_length)
    with bar(task.title, settings.steps, progress.step) as shown:
        while progress.step < settings.steps:
            step = trainer.step()
            shown.advance()
            last = progress.step == settings.steps
            if progress.step == task.keep_step:
                trainer.keep_parameters()
            if last or progress.step % _LOG_EVERY == 0:
                speed = round(meter.measure(progress.step))
                trainer.record(loss=step.loss, learning_rate=step.learning_rate, tokens_per_second=speed)
            if last or progress.step % settings.evaluate_every == 0:
                trainer.evaluate()
            dev = "" if progress.best_dev is None else f", dev {progress.best_dev:.3f}"
            shown.say(f"loss {step.loss:.3f}{dev}, {meter.speed:,.0f} tokens/s")
            if last or step.save_due:
                trainer.save_checkpoint()
    trainer.close()
    return progress


@dataclass(frozen=True)
class _Step:
    """The outcome of one training step."""

    loss: float
    """Mean loss of all ranks' lanes."""
    learning_rate: float
    """Learning rate of the step."""
    save_due: bool
    """Whether it is time for a checkpoint."""


class _Trainer:
    """A model in training: everything that a step changes, and the files that are written."""

    def __init__(self, task: TrainingTask, directory: Path, execution: Execution):
        hardware, settings = execution.hardware, task.settings
        self._task, self._directory = task, directory
        self._device, self._ranks = hardware.prepare(all_ranks=True), hardware.ranks
        lanes = self._ranks.own_lanes(settings.batch_size)
        if hardware.fsdp and settings.optimiser.kind == "muon":
            raise InputError("training.optimiser.kind = muon: Muon needs whole matrices; train without --fsdp")
        self._batches = TrainingBatches(
            task.train, settings.batch_size, settings.segment_length, seed=settings.seed, own=lanes
        )
        bf16 = settings.in_bf16(self._device)
        if bf16 and self._device.type == "cpu" and not has_bf16():
            say("this CPU only emulates bfloat16: training.bf16=false is faster here")
        self._replica = Replica(task.model, task.loss, self._device, hardware=hardware)
        self._accumulator = GradientAccumulator(self._replica, len(lanes), settings.micro_batch, bf16=bf16)
        self._optimiser = make_optimiser(
            settings.optimiser, self._replica.model, bf16=bf16, threads=self._accumulator.threads
        )
        if self._ranks.distributed:
            # DDP settles the order in which it adds up gradients after its first pass. So the first pass is one that
            # does not count; otherwise the first step after a resume would be rounded differently.
            self._add_gradients(task.first_step, [])
            self._optimiser.zero_grad(set_to_none=True)
        torch.manual_seed(settings.seed + 1 + self._ranks.rank)  # for dropout; the parameters were drawn before
        self.progress, lanes_memory = checkpoint.load_checkpoint(
            directory,
            self._replica.model,
            self._optimiser,
            device=self._device,
            first_step=task.first_step,
            ranks=self._ranks,
        )
        remedy = "run the same command again when all machines see the same files"
        self._ranks.refuse_unless_equal(self.progress.step, "checkpoints", remedy)
        self._memories = self._accumulator.split_memory(lanes_memory)
        self._log = None
        if self._ranks.is_first:
            self._log = RunLog(directory, self.progress.step, tensorboard=execution.tensorboard)
        self._saved, self._save_seconds = time.monotonic(), 0.0

    def step(self) -> _Step:
        """Reads a segment of every lane and updates the parameters."""
        optimiser, settings, number = self._optimiser, self._task.settings, self.progress.step
        rate = learning_rate(settings.optimiser, number, settings.steps, first_step=self._task.first_step)
        for group in optimiser.param_groups:
            group["lr"] = rate
        if self._batches.starts_epoch(number):
            self._memories = []
        self._accumulator.switch_dropout(on=number >= self._task.settings.dropout_from)
        own_loss, self._memories = self._add_gradients(number, self._memories)
        save_due = self._ranks.is_first and self._is_save_due()  # clocks differ: one rank decides for all
        summed, save = self._ranks.sum(own_loss, save_due)
        loss = summed / self._ranks.world_size
        norm = full_tensor(nn.utils.clip_grad_norm_(self._replica.model.parameters(), settings.optimiser.clip))
        if not math.isfinite(loss) or not torch.isfinite(norm):
            raise InputError(
                f"{self._task.title}: the loss is no longer a number at step {number} (learning rate {rate:.2g}); "
                "lower training.optimiser.learning_rate or lengthen its warm_up, and give --restart"
            )
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.progress.step += 1
        return _Step(loss, rate, bool(save))

    def _add_gradients(self, step: int, memories: LaneMemories) -> tuple[float, LaneMemories]:
        """Adds up the gradients of this rank's lanes; returns their mean loss and the memories after the step."""
        return self._accumulator.add(self._batches.batch(step).to(self._device), memories)

    def evaluate(self) -> None:
        """Measures the loss on dev and keeps the parameters if they are the best so far."""
        with self._replica.full_model() as model:
            dev_loss = self._ranks.broadcast(self._task.dev_loss() if self._ranks.is_first else None)
            self.record(dev_loss=dev_loss)
            if self.progress.best_dev is None or dev_loss < self.progress.best_dev:
                self.progress.best_dev, self.progress.best_step = dev_loss, self.progress.step
                self._write(model, BEST_FILE)

    def keep_parameters(self) -> None:
        """Writes the present parameters beside the best ones."""
        with self._replica.full_model() as model:
            self._write(model, KEPT_FILE)

    def _write(self, model: nn.Module, file: str) -> None:
        """Writes a model's parameters to a file, on the first rank only."""
        if self._ranks.is_first:
            checkpoint.save_tensors(self._directory / file, model.state_dict())

    def _is_save_due(self) -> bool:
        """Whether the last checkpoint is old enough: saving takes at most a twentieth of the time."""
        return time.monotonic() - self._saved > max(CHECKPOINT_SECONDS, 20 * self._save_seconds)

    def save_checkpoint(self) -> None:
        """Writes everything that the next step depends on."""
        began = time.monotonic()
        model, optimiser = self._replica.model, self._optimiser
        checkpoint.save_checkpoint(
            self._directory, self.progress, model, optimiser=optimiser, memories=self._memories, ranks=self._ranks
        )
        self._saved = time.monotonic()
        self._save_seconds = self._saved - began

    def record(self, **values: Any) -> None:
        """Writes values of the present step to the run's log."""
        if self._log is not None:
            self._log.write(self.progress.step, **values)

    def close(self) -> None:
        """Closes the run's log."""
        if self._log is not None:
            self._log.close()


class _SpeedMeter:
    """Measures tokens per second from one measurement to the next."""

    def __init__(self, step: int, tokens_per_step: int):
        self._step, self._tokens_per_step, self._time = step, tokens_per_step, time.monotonic()
        self.speed = 0.0
        """Tokens per second at the last measurement."""

    def measure(self, step: int) -> float:
        """Returns the speed since the last measurement."""
        now = time.monotonic()
        self.speed = self._tokens_per_step * (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return self.speed
