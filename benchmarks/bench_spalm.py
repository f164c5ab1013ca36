"""The time of a training step of SPALM relative to one of transformer-XL of the same size: `step_ratio`.

Both take turns on the same text, a few steps each, so that load on the machine slows both. The network and the batch
are a recipe's; the text is the standard library of this Python. Neighbours are read from a table on disk as in
training, but the table holds random entries, because finding neighbours is another benchmark.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch
from torch import nn

from spalm.artifact import Stage
from spalm.compute import Hardware
from spalm.console import say
from spalm.corpus import Corpus, TrainingBatches
from spalm.files import write_json
from spalm.lm import Reading, Transformer, segment_loss
from spalm.memory import Encoder, Memory, open_memory, remember, source_of_split
from spalm.neighbours import NeighbourTable
from spalm.neighbours.table import KIND, VERSION
from spalm.runs import Recipe, Run, read_recipe
from spalm.semiparametric import Retriever, Spalm
from spalm.semiparametric.training import spalm_segment_loss
from spalm.training.replica import Loss
from training_steps import TrainingSteps

STEPS = 4
"""Number of steps of each model in a round."""


class NoKeys(Encoder):
    """An encoder whose keys are zeros, because only the tokens of the memory are read here."""

    def keys(self, stream, start, stop, to_keys, width, progress=lambda _: None):  # noqa: ARG002
        progress(stop - start)
        return np.zeros((stop - start, width), "<f2")


def make_memory(corpus: Corpus, recipe: Recipe, folder: Path) -> Memory:
    """Returns a memory of the training text, without real keys."""
    reading = Reading.of(1, segment=64, memory=0, lanes=1)
    encoder = NoKeys("none", 8, corpus.vocabulary, reading, lambda: None, lambda: torch.device("cpu"))
    train = corpus.split("train")
    memory = open_memory(folder, encoder, recipe.memory, stream=train)
    remember(memory, encoder, train, source=source_of_split(corpus, "train"))
    return memory


def make_table(corpus: Corpus, memory: Memory, count: int, folder: Path) -> NeighbourTable:
    """Returns a table of `count` random neighbours of every training position."""
    positions = len(corpus.split("train"))

    def make(draft):
        random = np.random.default_rng(0)
        draft.write_array("train.ids", random.integers(0, positions, (positions, count)).astype("<i4"))
        draft.write_array("train.distances", random.random((positions, count), np.float32))
        return {"lineage": memory.lineage(), "splits": {"train": {"recall": None}}}, []

    Stage(KIND, VERSION, {"count": count}, {"memory": memory.digest}).make(folder, make)
    return NeighbourTable(folder, memory)


class ModelSteps:
    """Training steps of one model on successive batches of a text."""

    def __init__(self, model: nn.Module, loss: Loss, batches: TrainingBatches, recipe: Recipe):
        training = recipe.training
        self._steps = TrainingSteps(model, loss, training.optimiser, lanes=training.batch_size, bf16=training.bf16)
        self._batches, self._done = batches, 0

    def seconds(self, count: int) -> float:
        """Makes `count` steps and returns the mean seconds of one."""
        found = [self._steps.step(self._batches.batch(self._done + number)) for number in range(count)]
        self._done += count
        return statistics.mean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/spalm.json"))
    parser.add_argument("--recipe", default="wikitext2", help="recipe whose network, batch and gate are measured")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    folder = given.out.parent / "spalm"
    text = read_recipe("demo", [])
    corpus = Run(text, folder).corpus
    recipe = read_recipe(given.recipe, [])
    Hardware().prepare()
    memory = make_memory(corpus, recipe, folder / "memory")
    gate = recipe.spalm_model.spalm.gate
    table = make_table(corpus, memory, gate.neighbours, folder / "neighbours")
    training, length = recipe.training, recipe.training.memory_length
    batches = TrainingBatches(corpus.split("train"), training.batch_size, training.segment_length, seed=1)
    plain = Transformer(recipe.network, corpus.vocabulary).initialise(1)
    with_memory = Spalm(Transformer(recipe.network, corpus.vocabulary), gate).initialise(1)
    retriever = Retriever(table, "train", gate.neighbours)
    both = [
        ModelSteps(
            plain, lambda model, batch, memory: segment_loss(model, length, batch, memory=memory), batches, recipe
        ),
        ModelSteps(
            with_memory,
            lambda model, batch, memory: spalm_segment_loss(model, retriever, length, batch=batch, memory=memory),
            batches,
            recipe,
        ),
    ]
    for each in both:
        each.seconds(2)  # the first steps are slower: they allocate memory
    rounds = [[each.seconds(STEPS) for each in both] for _ in range(given.rounds)]
    ratio = statistics.median(after / before for before, after in rounds)
    result = {
        "step_ratio": ratio,
        "seconds_transformer_xl": statistics.median(before for before, _ in rounds),
        "seconds_spalm": statistics.median(after for _, after in rounds),
        "recipe": given.recipe,
        "neighbours": gate.neighbours,
        "rounds": given.rounds,
    }
    write_json(given.out, result)
    say(f"a step of SPALM takes {ratio:.3f} times one of transformer-XL ({given.recipe}); written to {given.out}")


if __name__ == "__main__":
    main()
