"""LoRA by peft, trained on the documents that a memory holds, for a given number of core-seconds.

The learning rate rises over the first twentieth of the budget and then falls to 0 at its end. The parameters that were
best on dev are kept. Time spent on dev is not counted: it would make LoRA worse. The result is merged into the weights
and saved as a model of its own, so it is measured, and given a memory, in the same way as the model that it came from.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spalm.compute.hardware import has_bf16
from spalm.corpus import TokenStream

_BATCH_TOKENS = 4096
"""Number of tokens of a step, about, padding included."""
_WARM_UP = 0.05
"""Share of the budget over which the learning rate rises."""
_EVALUATIONS = 8
"""Number of times that a run is measured on dev."""
_IGNORED = -100
"""Target of padding."""


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
    parts = [padded(texts[start : start + 4]) for start in range(0, len(texts), 4)]
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


def train_lora(
    folder: Path, train: TokenStream, dev: TokenStream, *, settings: LoraSettings, budget: float, out: Path | None
) -> LoraRun:
    """Trains LoRA for so many core-seconds; writes the merged model to `out`, if that is given."""
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
    model = get_peft_model(plain, given)
    length = min(1024, getattr(plain.config, "max_position_embeddings", 1024)) - 1
    texts, held_out = windows(train, length), windows(dev, length)
    random, spent = np.random.default_rng(1), Budget(budget)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimiser = torch.optim.AdamW(parameters, settings.rate, weight_decay=0.0)
    before = mean_loss(model, held_out)
    best, kept, curve, steps, tokens = before, [each.detach().clone() for each in parameters], [(0.0, before)], 0, 0
    while spent.spent < 1:
        for inputs, targets in batches(texts, random):
            spent.start()
            model.train()
            optimiser.param_groups[0]["lr"] = settings.rate * spent.rate
            count = int((targets != _IGNORED).sum())
            optimiser.zero_grad(set_to_none=True)
            (_loss(model, inputs, targets) / count).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            spent.stop()
            steps, tokens = steps + 1, tokens + count
            if spent.spent * _EVALUATIONS >= len(curve):
                curve.append((spent.core_seconds, mean_loss(model, held_out)))
                if curve[-1][1] < best:
                    best, kept = curve[-1][1], [each.detach().clone() for each in parameters]
            if spent.spent >= 1:
                break
    if out is not None:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept):
                parameter.copy_(value)
        _save_merged(model, folder, out)
    return LoraRun(
        asdict(settings), budget, spent.core_seconds, spent.seconds, steps, tokens, before, best, curve=curve
    )


def _save_merged(model: Any, folder: Path, out: Path) -> None:
    """Writes the model with LoRA merged into its weights, and the tokeniser."""
    from transformers import AutoTokenizer

    merged = model.merge_and_unload()
    merged.save_pretrained(out, safe_serialization=True)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
