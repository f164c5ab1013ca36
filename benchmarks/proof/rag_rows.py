"""The rows of in-context retrieval for one domain: tuned on dev, alone and with the memory on top."""

import copy
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proof.curves import DomainTexts
from proof.lora_rows import held_out
from proof.rag import PASSAGE, BlockReader, PassageRetriever, Passages, RagSettings, beginnings, mean_log_probability
from proof.scores import retrieved_for
from proof.study import SEED, Clock, Study
from spalm.attachment import Attached
from spalm.attachment.fitting.examples import examples_from_hidden
from spalm.attachment.fitting.learning import mixture_log_probabilities
from spalm.attachment.fitting.measuring import sums_by_document
from spalm.attachment.fitting.own_text import write_own_text
from spalm.corpus import TokenStream
from spalm.semiparametric import TrainingExamples
from spalm.semiparametric.mixture.adaptive import calibrate

_OWN_SHARE = 4
"""One of so many tokens of the model's own text is calibrated on, as when a memory is attached."""


class RagRows:
    """Retrieves from the training documents of a memory; every setting that is tried is kept."""

    def __init__(self, study: Study, texts: DomainTexts, attached: Attached):
        self._study, self._texts, self._attached = study, texts, attached
        self.tokeniser = attached.corpus.tokeniser

    @cached_property
    def passages(self) -> Passages:
        """The passages of the training documents."""
        return Passages.of(self._attached.corpus.split("train"), self.tokeniser)

    def retriever(self, settings: RagSettings) -> PassageRetriever:
        """Returns an index of the passages with these settings."""
        return PassageRetriever(self.passages, self.tokeniser, settings)

    @cached_property
    def tried(self) -> list[dict[str, Any]]:
        """The settings that were tried on the beginnings of all documents of dev, with their mean log p, best first."""
        text = beginnings(self._attached.corpus.split("dev"), PASSAGE)
        readers: list[BlockReader] = []

        def measure(settings: RagSettings) -> dict[str, Any]:
            base = self._attached.base
            readers.append(readers[0] if readers else BlockReader(base))
            hidden, _ = readers[0].hidden(text, self.retriever(settings), f"RAG on dev: {settings}")
            return {"settings": asdict(settings), "mean_log_p": mean_log_probability(base, hidden, text)}

        found = [
            self._study.made(
                f"rag-{self._texts.name}-{number}",
                [self._texts.identity(self._study), asdict(settings)],
                lambda settings=settings: measure(settings),
            )
            for number, settings in enumerate(RagSettings.grid()[: self._study.sizes.retrievers])
        ]
        return sorted(found, key=lambda each: -each["mean_log_p"])

    @property
    def best(self) -> RagSettings:
        """The settings that were best on dev."""
        return RagSettings(**self.tried[0]["settings"])

    def measured(self) -> dict[str, Any]:
        """Returns the sums of log p over the documents of test, alone and with the memory on top, and the costs."""
        identity = [self._texts.identity(self._study), asdict(self.best)]
        return self._study.made(f"rag-{self._texts.name}", identity, self._measure)

    def _measure(self) -> dict[str, Any]:
        attached, retriever = self._attached, self.retriever(self.best)
        dev, test = held_out(attached, "dev"), held_out(attached, "test")
        on_dev, _ = BlockReader(attached.base).hidden(dev, retriever, "RAG: dev")
        clock = Clock()
        with clock.running():
            on_test, read = BlockReader(attached.base).hidden(test, retriever, "RAG: test")
        examples = self._examples(test, on_test)
        calibrated_on = self._examples(dev, on_dev)
        if attached.settings.own_text:
            calibrated_on = calibrated_on.concatenate(self._own_examples())
        mixture = calibrate(copy.deepcopy(attached.mixture), calibrated_on)
        rows = {"RAG": examples.log_base, "RAG with the memory": mixture_log_probabilities(mixture, examples)}
        return {
            "documents": sums_by_document(rows, test),
            "index_core_seconds": retriever.core_seconds,
            "read_per_token": read / len(test),
            "clock": asdict(clock),
        }

    def _examples(self, text: TokenStream, hidden: Tensor) -> TrainingExamples:
        """Returns the positions of a text with these hidden states, with what the memory has for them."""
        positions = np.arange(len(text))
        retrieved = retrieved_for(self._attached, text, positions, hidden=hidden)
        targets = torch.from_numpy(text.targets(positions))
        return examples_from_hidden(self._attached.base, hidden, retrieved, targets=targets)

    def _own_examples(self) -> TrainingExamples:
        """Returns text that the model writes by itself, as much of it as a memory's mixture is calibrated on."""
        attached, start = self._attached, self.tokeniser.start
        tokens = max(1, attached.settings.own_text // _OWN_SHARE)
        text, hidden = write_own_text(attached.base, tokens, start=start, seed=SEED + 1)
        predicted = np.setdiff1d(np.arange(len(text)), text.begins)  # first tokens are not the model's
        return self._examples(text, hidden)[torch.from_numpy(predicted)]
