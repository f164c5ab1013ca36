"""LoRA by peft, trained on the documents that a memory holds, for a given number of core-seconds.

The learning rate rises over the first twentieth of the budget and then falls to 0 at its end. The parameters that were
best on dev are kept. Time spent on dev is not counted: it would make LoRA worse. A training that was stopped goes on
from its last checkpoint. The result is merged into the weights and saved as a model of its own, so it is measured, and
given a memory, in the same way as the model that it came from.
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spalm.compute import has_bf16
from spalm.corpus import TokenStream
from spalm.files import replacing

_BATCH_TOKENS = 1024
"""Number of tokens of a step, about, padding included: more would leave too few steps at equal cost."""
_DEV_TOKENS = 4000
"""Highest number of tokens of dev on which a run is measured."""
_WARM_UP = 0.05
"""Share of the budget over which the learning rate rises."""
_EVALUATIONS = 8
"""Number of times that a run is measured on dev."""
_BETWEEN_CHECKPOINTS = 120.0
"""Seconds between two checkpoints."""
_IGNORED = -100
"""Target of padding."""
_ADAPTER, _CHECKPOINT = "adapter.safetensors", "checkpoint.pt"


@dataclass(frozen=True)
class LoraSettings:
    """What LoRA is tuned over."""

    rank: int
    rate: float


@dataclass
class LoraRun:
    """What became of one training."""

    settings: dict[str, Any]
    budget: float
    """Core-seconds that it might take."""
    core_seconds: float
    """Core-seconds that it took."""
    seconds: float
    steps: int
    tokens: int
    """Number of tokens that it read, passes over the same text counted each."""
    dev_before: float
    """Mean loss on dev of the model itself."""
    dev: float
    """Lowest mean loss on dev."""
    curve: list[tuple[float, float]]
    """Core-seconds and loss, at each measurement on dev."""
    adapter: str
    """File of the parameters that were best on dev."""


def windows(stream: TokenStream, length: int) -> list[np.ndarray]:
    """Returns every document, cut into windows of at most `length` tokens, each with the start symbol before it."""
    found = []
    for begin, end in zip(stream.begins.tolist(), stream.ends.tolist()):
        for start in range(begin, end, length):
            found.append(np.append(stream.start, stream.tokens[start : min(end, start + length)].astype(np.int64)))
    return found


def batches(texts: list[np.ndarray], random: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (inputs, targets) of one pass over some windows in random order; those of a batch are about as long."""
    order = sorted(random.permutation(len(texts)).tolist(), key=lambda number: len(texts[number]) // 64)
    groups: list[list[int]] = [[]]
    for number in order:
        if groups[-1] and (len(groups[-1]) + 1) * len(texts[number]) > _BATCH_TOKENS:
            groups.append([])
        groups[-1].append(number)
    for which in random.permutation(len(groups)).tolist():
        yield padded([texts[number] for number in groups[which]])


def padded(texts: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Returns windows as inputs and the tokens that follow them."""
    longest = max(map(len, texts)) - 1
    inputs, targets = np.zeros((len(texts), longest), np.int64), np.full((len(texts), longest), _IGNORED)
    for row, text in enumerate(texts):
        inputs[row, : len(text) - 1], targets[row, : len(text) - 1] = text[:-1], text[1:]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the summed loss of the tokens of a batch."""
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16()):
        logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
    flat = logits.float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=_IGNORED, reduction="sum")


@torch.no_grad()
def mean_loss(model: Any, texts: list[np.ndarray]) -> float:
    """Returns the mean loss of the tokens of some windows."""
    model.eval()
    parts = [padded(texts[start : start + 2]) for start in range(0, len(texts), 2)]
    total = sum(float(_loss(model, inputs, targets)) for inputs, targets in parts)
    return total / sum(len(text) - 1 for text in texts)


class Budget:
    """Core-seconds that may be spent, and those that were spent while the clock ran."""

    def __init__(self, core_seconds: float):
        self.whole, self.core_seconds, self.seconds = core_seconds, 0.0, 0.0
        self._since = (0.0, 0.0)

    def start(self) -> None:
        """Lets the clock run."""
        self._since = time.process_time(), time.perf_counter()

    def stop(self) -> None:
        """Stops the clock."""
        self.core_seconds += time.process_time() - self._since[0]
        self.seconds += time.perf_counter() - self._since[1]

    @property
    def spent(self) -> float:
        """Share of the budget that is spent, at most 1."""
        return min(1.0, self.core_seconds / self.whole)

    @property
    def rate(self) -> float:
        """What the highest learning rate is multiplied with by now."""
        return min(1.0, 0.1 + 0.9 * self.spent / _WARM_UP) * (1 - self.spent) / (1 - min(self.spent, _WARM_UP))


def with_lora(folder: Path, settings: LoraSettings) -> Any:
    """Returns the model in a folder with new parameters of LoRA at all its linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        lora_dropout=0.05,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(plain, given)


def _trained(model: Any) -> dict[str, Tensor]:
    """Returns the parameters of LoRA."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


class LoraTraining:
    """One training: the model, what it has spent, and what was best on dev so far."""

    def __init__(self, folder: Path, settings: LoraSettings, budget: float):
        self.model, self.settings, self.spent = with_lora(folder, settings), settings, Budget(budget)
        self.parameters = _trained(self.model)
        self.optimiser = torch.optim.AdamW(self.parameters.values(), settings.rate, weight_decay=0.0)
        self.steps, self.tokens, self.passes = 0, 0, 0
        self.curve: list[tuple[float, float]] = []
        self.best = self._copied()

    def _copied(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.parameters.items()}

    def measure(self, held_out: list[np.ndarray]) -> None:
        """Notes the loss on dev, and keeps the parameters if it is the lowest so far."""
        loss = mean_loss(self.model, held_out)
        if not self.curve or loss < min(known for _, known in self.curve):
            self.best = self._copied()
        self.curve.append((self.spent.core_seconds, loss))

    @property
    def should_measure(self) -> bool:
        """Whether the next share of the budget is spent."""
        return self.spent.spent * _EVALUATIONS >= len(self.curve)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Makes one step of the optimiser."""
        self.spent.start()
        self.model.train()
        self.optimiser.param_groups[0]["lr"] = self.settings.rate * self.spent.rate
        count = int((targets != _IGNORED).sum())
        self.optimiser.zero_grad(set_to_none=True)
        (_loss(self.model, inputs, targets) / count).backward()
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), 1.0)
        self.optimiser.step()
        self.spent.stop()
        self.steps, self.tokens = self.steps + 1, self.tokens + count

    def save(self, path: Path) -> None:
        """Writes everything from which the training can go on."""
        state = {
            "parameters": self._copied(),
            "best": self.best,
            "optimiser": self.optimiser.state_dict(),
            "spent": (self.spent.core_seconds, self.spent.seconds),
            "counts": (self.steps, self.tokens, self.passes),
            "curve": self.curve,
        }
        with replacing(path, sync=False) as temporary:
            torch.save(state, temporary)

    def load(self, path: Path) -> None:
        """Goes on from what was written, with a new pass over the text."""
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self.parameters[name].copy_(value)
        self.optimiser.load_state_dict(state["optimiser"])
        self.best, self.curve = state["best"], state["curve"]
        self.spent.core_seconds, self.spent.seconds = state["spent"]
        self.steps, self.tokens, self.passes = state["counts"]


def train_lora(
    folder: Path, train: TokenStream, dev: TokenStream, *, settings: LoraSettings, budget: float, out: Path
) -> LoraRun:
    """Trains LoRA for so many core-seconds; writes the best parameters to the folder `out`."""
    training = LoraTraining(folder, settings, budget)
    length = min(1024, getattr(training.model.config, "max_position_embeddings", 1024)) - 1
    texts, held_out = windows(train, length), windows(dev.beginning(_DEV_TOKENS), length)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / _CHECKPOINT
    if checkpoint.exists():
        training.load(checkpoint)
    else:
        training.measure(held_out)
    saved_at, spent = time.monotonic(), training.spent
    while spent.spent < 1:
        training.passes += 1
        for inputs, targets in batches(texts, np.random.default_rng([1, training.passes])):
            training.step(inputs, targets)
            if training.should_measure:
                training.measure(held_out)
            if time.monotonic() - saved_at > _BETWEEN_CHECKPOINTS:
                training.save(checkpoint)
                saved_at = time.monotonic()
            if spent.spent >= 1:
                break
    save_file(training.best, out / _ADAPTER)
    checkpoint.unlink(missing_ok=True)
    losses = [loss for _, loss in training.curve]
    times, counts = (spent.core_seconds, spent.seconds), (training.steps, training.tokens)
    return LoraRun(
        *(asdict(settings), budget, *times, *counts, losses[0], min(losses)), training.curve, str(out / _ADAPTER)
    )


def merge_lora(folder: Path, run: dict[str, Any], out: Path) -> Path:
    """Writes a model with the parameters of a training merged into its weights, and its tokeniser; returns its folder.

    `run` is a `LoraRun` as JSON.
    """
    from transformers import AutoTokenizer

    if out.exists():
        return out
    model = with_lora(folder, LoraSettings(**run["settings"]))
    parameters = _trained(model)
    with torch.no_grad():
        for name, value in load_file(run["adapter"]).items():
            parameters[name].copy_(value)
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.merge_and_unload().save_pretrained(unfinished, safe_serialization=True)
    AutoTokenizer.from_pretrained(folder).save_pretrained(unfinished)
    unfinished.rename(out)
    return out
