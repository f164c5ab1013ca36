"""The rows of LoRA for one domain: tuned, at equal cost, until it stops, with the memory on top, and of another domain.

Every setting is tried with a quarter of the core-seconds that attaching took, and the best two with all of them. The
budget of the better one is then doubled as long as dev improves, with the next lower rate too.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proof.curves import DomainTexts
from proof.lora import LoraSettings, merge_lora, train_lora
from proof.study import Study
from spalm.attachment import Attached
from spalm.attachment.fitting.examples import held_out_text
from spalm.attachment.fitting.measuring import sums_by_document
from spalm.corpus import TokenStream
from spalm.lm.pretrained import PretrainedFolder
from spalm.runs import HeldOut

Run = dict[str, Any]
"""A `LoraRun` as JSON."""
_TUNING_SHARE, _FINALISTS = 0.25, 2
"""Share of the budget with which settings are tried, and the number of them that get all of it."""
_LOWER = 1 / 3
"""What the rate is multiplied with for a lower one than those that were tried."""
_ENOUGH = 1e-3
"""Loss in nats by which LoRA must improve on dev for its budget to be doubled again."""


def held_out(attached: Attached, split: HeldOut) -> TokenStream:
    """Returns the text of dev or test that the figures of a memory are measured on."""
    return held_out_text(attached.corpus.split(split), attached.settings)[0]


class LoraRows:
    """Trains LoRA on the training documents of a memory, and measures it; every training is kept."""

    def __init__(self, study: Study, texts: DomainTexts, attached: Attached):
        self._study, self._texts, self._attached = study, texts, attached
        self._folder = study.directory / "lora" / texts.core.stem
        self._base = attached.base.folder.path

    def _run(self, settings: LoraSettings, budget: float) -> Run:
        """Returns what became of a training with so many core-seconds."""
        title = f"{settings.rank}-{settings.rate:.2g}-{budget:.0f}"

        def make() -> Run:
            train, dev = self._attached.corpus.split("train"), held_out(self._attached, "dev")
            out = self._folder / title
            return asdict(train_lora(self._base, train, dev, settings=settings, budget=budget, out=out))

        identity = [asdict(settings), budget, self._texts.identity(self._study)]
        return self._study.made(f"lora-{self._texts.name}-{title}", identity, make)

    def trained(self, budget: float) -> dict[str, Any]:
        """Returns all runs, the best one at equal cost, and the one that more did not improve."""
        sizes = self._study.sizes
        settings = [LoraSettings(rank, rate) for rank in sizes.ranks for rate in sizes.rates]
        tried = sorted((self._run(each, _TUNING_SHARE * budget) for each in settings), key=lambda run: run["dev"])
        finalists = [self._run(LoraSettings(**run["settings"]), budget) for run in tried[:_FINALISTS]]
        equal = longest = min(finalists, key=lambda run: run["dev"])
        seconds, stopped = budget, False
        chosen = self._with_lower_rate(LoraSettings(**equal["settings"]))
        for _ in range(sizes.doublings):
            seconds *= 2
            further = min((self._run(each, seconds) for each in chosen), key=lambda run: run["dev"])
            if further["dev"] > longest["dev"] - _ENOUGH:
                stopped = True
                break
            longest, chosen = further, [LoraSettings(**further["settings"])]
        return {"tried": tried, "finalists": finalists, "equal": equal, "until it stops": longest, "stopped": stopped}

    def _with_lower_rate(self, settings: LoraSettings) -> list[LoraSettings]:
        lower = [rate for rate in self._study.sizes.rates if rate < settings.rate]
        return [settings, replace(settings, rate=max(lower, default=_LOWER * settings.rate))]

    @contextmanager
    def _merged(self, run: Run) -> Iterator[Path]:
        """Yields the folder of the model with a training merged into it, which is removed at the end."""
        folder = merge_lora(self._base, run, Path(run["adapter"]).parent / "merged")
        yield folder
        shutil.rmtree(folder)

    def with_memory(self, run: Run) -> dict[str, list[float]]:
        """Returns the sums of log p over the documents of test, of LoRA alone and with the memory on top."""
        name = f"{self._texts.memory_name(self._study, self._texts.core_tokens, 0)}-{Path(run['adapter']).parent.name}"

        def make() -> dict[str, list[float]]:
            settings = self._texts.attach_settings(self._study, keys=self._texts.core_tokens, library=[])
            with self._merged(run) as folder:
                attached, _ = self._study.attach(name, [self._texts.core], settings, model=folder)
                return attached.combiner_artifact.facts["documents"]["test"]

        found = self._study.made(f"on-{name}", [self._texts.identity(self._study), run], make)
        self._study.remove(name)
        return found

    def of_another_domain(self, run: Run, other: str) -> list[float]:
        """Returns the sums of log p over the documents of test, of LoRA that was trained on another domain."""

        def make() -> list[float]:
            with self._merged(run) as folder:
                base = replace(self._attached.base, folder=PretrainedFolder(folder))
                text = held_out(self._attached, "test")
                targets = torch.from_numpy(text.targets(np.arange(len(text))))
                scores = base.model.target_log_probabilities(base.hidden(text, f"LoRA of {other}"), targets)
                return sums_by_document({"LoRA": scores}, text)["LoRA"]

        identity = [self._texts.identity(self._study), run]
        return self._study.made(f"lora-{self._texts.name}-of-{other}", identity, make)


def rows_of_lora(lora: LoraRows, runs: Mapping[str, Any], tokens: list[float]) -> dict[str, list[float]]:
    """Returns the sums of log p over the documents of test, of LoRA at both costs and with the memory on top."""
    rows = {}
    for row, kind in (("LoRA, equal cost", "equal"), ("LoRA, until it stops", "until it stops")):
        own = lora.with_memory(runs[kind])
        assert own["tokens"] == tokens, "all are measured on the same documents"
        rows[row], rows[f"{row}, with the memory"] = own["plain"], own["adaptive"]
    return rows
