"""Every analysis by its name."""

from collections.abc import Callable

from spalm.errors import InputError
from spalm.semiparametric import FinishedRun, HeldOut
from spalm.study.analysis import Analysis, Asked
from spalm.study.by_neighbours import by_neighbours, made_before
from spalm.study.comparisons import all_pairs, cost_of_ablation, neighbour_matches, training_curves
from spalm.study.gates import gate_heatmap, gate_histogram
from spalm.study.outputs import output_analysis
from spalm.study.passage import passage_of
from spalm.study.slices import by_frequency, by_position
from spalm.study.strips import neighbour_strips

ANALYSES: dict[str, Callable[[Asked], Analysis]] = {
    "strips": neighbour_strips,
    "outputs": output_analysis,
    "gates": gate_histogram,
    "heatmap": gate_heatmap,
    "neighbours": by_neighbours,
    "matches": neighbour_matches,
    "significance": all_pairs,
    "position": by_position,
    "frequency": by_frequency,
    "ablation": cost_of_ablation,
    "curves": training_curves,
}


def available(run: FinishedRun) -> list[str]:
    """The analyses that a run has something for: numbers of neighbours are varied only where somebody asked for it."""
    return [name for name in ANALYSES if name != "neighbours" or len(made_before(run)) > 2]


def analyses(names: list[str]) -> list[Callable[[Asked], Analysis]]:
    for name in names:
        if name not in ANALYSES:
            raise InputError(f"there is no analysis {name!r}; take of {', '.join(ANALYSES)}")
    return [ANALYSES[name] for name in names]


def ask(run: FinishedRun, split: HeldOut, model: str, first: int | None, length: int) -> Asked:
    """What a user wants to look at; refuses what the run does not have."""
    if model not in run.models:
        raise InputError(f"{run.directory} has no {model}; take one of {', '.join(run.models)}")
    count = len(run.corpus.split(split))
    if first is not None and first >= count:
        raise InputError(f"--first {first:,}: {split} has {count:,} tokens; give less")
    return Asked(run, split, model, passage_of(run, split, length, first))
