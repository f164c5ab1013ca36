"""Checks before anything is trained: resolves the exclusion for the text, and refuses a text that cannot work."""

from typing import TypeVar

import numpy as np

from spalm.corpus import Corpus, TokenStream, TrainingBatches
from spalm.errors import InputError
from spalm.neighbours import Exclusion
from spalm.runs.recipe import Recipe
from spalm.runs.rows import HELD_OUT

AnyExclusion = TypeVar("AnyExclusion", bound=Exclusion)
_LARGEST_SHARE = 0.5
"""Share of the training tokens in one document above which a document's own positions cannot be excluded."""
_WINDOW_SHARE, _WIDEST_WINDOW = 0.01, 1024
"""Size of the window that is excluded instead, as a share of the training tokens, and its upper bound."""
_SHORTEST_HELD_OUT = 2
"""Tokens that dev and test need: a mixture learns from one half of dev and is scored on the other."""


def resolve_exclusion(wanted: AnyExclusion, train: TokenStream) -> AnyExclusion:
    """Returns the exclusion with which the neighbours of the training text are found.

    It is `wanted`, except where neighbours are to come from other documents and one document holds more than half of
    the training tokens: most positions would then have few neighbours to choose from, or none. Then only a window
    around each position is excluded: that of `wanted` if it has one, else a hundredth of the training tokens, at most
    1,024.
    """
    if not wanted.document or largest_share(train) <= _LARGEST_SHARE:
        return wanted
    window = wanted.window or max(1, min(_WIDEST_WINDOW, int(_WINDOW_SHARE * len(train))))
    return wanted.model_copy(update={"document": False, "window": window})


def exclusion_notice(wanted: Exclusion, resolved: Exclusion, train: TokenStream) -> str | None:
    """Returns a line that explains why the exclusion is not the one that was wanted; None if it is."""
    if resolved == wanted:
        return None
    return (
        f"one document holds {largest_share(train):.0%} of the training text, so a training position's neighbours come "
        f"from its own document too, but not from the {resolved.window:,} positions before and after it"
    )


def largest_share(text: TokenStream) -> float:
    """Returns the share of the tokens that the largest document holds."""
    return float(np.diff(text.ends, prepend=0).max()) / len(text)


def refuse_unless_trainable(recipe: Recipe, corpus: Corpus) -> None:
    """Refuses a text that is too short for the recipe, before anything is trained on it."""
    training, train = recipe.training, corpus.split("train")
    TrainingBatches(train, training.batch_size, training.segment_length, seed=training.seed)
    for split in HELD_OUT:
        if len(corpus.split(split)) < _SHORTEST_HELD_OUT:
            raise InputError(
                f"the {split} split has {len(corpus.split(split)):,} token(s), at least {_SHORTEST_HELD_OUT} are "
                f"needed; give more text, or a larger corpus.source.{split}_share"
            )
    lengths = {"training.memory_length": [training.memory_length]}
    lengths |= {"evaluation.memory_lengths": recipe.evaluation.memory_lengths}
    for name, wanted in [(name, max(each)) for name, each in lengths.items() if each]:
        if wanted > len(train):
            raise InputError(
                f"{name} = {wanted:,}: the training text has {len(train):,} tokens, so no more can be remembered; give "
                "a shorter short-term memory"
            )
    if recipe.neighbours.window >= len(train) - 1:
        raise InputError(
            f"neighbours.window = {recipe.neighbours.window:,}: the training text has {len(train):,} tokens, so no "
            "position would have a neighbour; give a smaller window"
        )
