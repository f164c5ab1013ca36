"""A race of settings of transformer-XL: the loss on dev after the time that the recipe takes for `--steps` steps.

Step times of all settings are measured first, in turn, so that load on the machine slows them alike; `cost` is a step's
time in steps of the recipe. Each then makes as many steps as its cost allows, and its schedule ends with them. Losses
are per byte of text too, so that other vocabularies compare. What is in the file already is not trained again.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch

from spalm.compute import Execution
from spalm.console import say
from spalm.corpus import Corpus, TrainingBatches, build_corpus
from spalm.files import write_json
from spalm.lm import ModelSettings, Transformer, segment_loss, train_model
from spalm.runs import Recipe, read_recipe
from training_steps import TrainingSteps

PLAIN = "network.dropout=0 training.optimiser.final_share=0"
MUON = f"{PLAIN} training.optimiser.kind=muon"
WIDE = "network.width=192 network.head_width=48 network.feed_forward=768"
SETTINGS = {
    "the recipe of 0.1.0": "",
    "without dropout, to zero": PLAIN,
    "wide": f"{PLAIN} {WIDE}",
    "muon": MUON,
    "muon, 3 iterations": f"{MUON} training.optimiser.muon_iterations=3",
    "muon, 16 lanes": f"{MUON} training.batch_size=16",
    "muon, wide": f"{MUON} {WIDE}",
    "muon, wide, 16 lanes": f"{MUON} {WIDE} training.batch_size=16",
    "muon, squared relu": f"{MUON} network.activation=squared-relu",
    "muon, normalised keys": f"{MUON} network.normalised_keys=true",
    "muon, rate 2e-3": f"{MUON} training.optimiser.learning_rate=2e-3",
    "muon, rate 8e-3": f"{MUON} training.optimiser.learning_rate=8e-3",
}
"""Settings that are laid over the recipe, by what they are."""
ROUNDS, STEPS = 5, 3
"""Rounds of measuring step times, and steps of each in a round."""


class Racer:
    """A transformer-XL with settings of its own."""

    def __init__(self, name: str, recipe: Recipe, corpus: Corpus):
        self.name, self.corpus, self.settings = name, corpus, recipe.transformer_xl
        self.step_tokens = recipe.training.batch_size * recipe.training.segment_length

    def step_seconds(self) -> float:
        """Returns the median time of a step, after one that does not count."""
        training = self.settings.training
        lanes = training.batch_size
        model = Transformer(self.settings.network, self.corpus.vocabulary).initialise(0)
        steps = TrainingSteps(
            model,
            lambda model, batch, memory: segment_loss(model, training.memory_length, batch, memory=memory),
            training.optimiser,
            lanes=lanes,
            bf16=training.in_bf16(torch.device("cpu")),
        )
        train = self.corpus.split("train")
        batches = TrainingBatches(train, lanes, training.segment_length, seed=0, own=range(lanes))
        return statistics.median([steps.step(batches.batch(number)) for number in range(1 + STEPS)][1:])

    def train(self, steps: int, folder: Path) -> dict[str, float]:
        """Trains for so many steps, unless that was done; returns the loss on dev."""
        optimiser = self.settings.training.optimiser
        shortened = optimiser.model_copy(update={"warm_up": min(optimiser.warm_up, steps // 10)})
        training = self.settings.training.model_copy(
            update={"steps": steps, "evaluate_every": steps, "optimiser": shortened}
        )
        settings = ModelSettings(network=self.settings.network, training=training)
        began = time.monotonic()
        model = train_model(settings, self.corpus, folder, execution=Execution())
        loss = model.facts["best_dev_loss"]
        return {
            "steps": steps,
            "tokens": steps * self.step_tokens,
            "parameters": model.parameters,
            "dev_loss": loss,
            "dev_loss_per_byte": loss * self._tokens_per_byte(),
            "seconds": time.monotonic() - began,
        }

    def _tokens_per_byte(self) -> float:
        """Returns the number of tokens in a byte of the part of dev that is read."""
        split = self.corpus.split("dev")
        stop = min(self.settings.training.dev_tokens or len(split), len(split))
        text = self.corpus.tokeniser.decode(split.tokens[:stop].tolist())
        return stop / len(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="wikitext2")
    parser.add_argument("--steps", type=int, default=1200, help="steps of the recipe, whose time each has")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/bases"))
    parser.add_argument("--only", help="names of settings, separated by ;")
    parser.add_argument("--more", action="append", default=[], metavar="NAME:SETTINGS", help="further settings")
    given = parser.parse_args()
    chosen = given.only.split(";") if given.only else [] if given.more else list(SETTINGS)
    chosen = {name: SETTINGS[name] for name in chosen} | dict(each.split(":", 1) for each in given.more)
    racers = []
    for name, settings in {"": "", **chosen}.items():  # first the recipe itself, to compare step times with
        recipe = read_recipe(given.recipe, settings.split())
        corpus = build_corpus(recipe.corpus, given.folder / f"corpus-{recipe.corpus.tokeniser.size}")
        racers.append(Racer(name, recipe, corpus))
    times = [[racer.step_seconds() for racer in racers] for _ in range(ROUNDS)]
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    for number, racer in enumerate(racers[1:], 1):
        if racer.name in found:
            continue
        cost = statistics.median(each[number] / each[0] for each in times)
        steps = math.ceil(given.steps / cost)
        folder = given.folder / racer.name.replace(" ", "-").replace(",", "")
        found[racer.name] = {"settings": chosen[racer.name], "cost": cost, **racer.train(steps, folder)}
        write_json(given.out, found)
        row = found[racer.name]
        say(f"{racer.name}: {row['tokens'] / 1e6:.2f}M tokens, dev {row['dev_loss']:.3f}, {row['seconds']:.0f} s")


if __name__ == "__main__":
    main()
