"""Every analysis by its name, and how a user's wish becomes a call of it."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from spalm.errors import InputError
from spalm.runs import FinishedRun, HeldOut
from spalm.runs.passage import passage_of
from spalm.study.analyses.ablation import ablation_cost
from spalm.study.analyses.by_neighbours import by_neighbours, existing_variants
from spalm.study.analyses.curves import training_curves
from spalm.study.analyses.gates import gate_heatmap, gate_histogram
from spalm.study.analyses.matches import neighbour_matches
from spalm.study.analyses.outputs import output_analysis
from spalm.study.analyses.pairs import pairwise_significance
from spalm.study.analyses.slices import by_frequency, by_position
from spalm.study.analyses.strips import neighbour_strips
from spalm.study.analysis import Analysis, AnalysisRequest

ANALYSES: dict[str, Callable[[AnalysisRequest], Analysis]] = {
    "strips": neighbour_strips,
    "outputs": output_analysis,
    "gates": gate_histogram,
    "heatmap": gate_heatmap,
    "neighbours": by_neighbours,
    "matches": neighbour_matches,
    "significance": pairwise_significance,
    "position": by_position,
    "frequency": by_frequency,
    "ablation": ablation_cost,
    "curves": training_curves,
}
_LENGTH = 48


def available(run: FinishedRun) -> list[str]:
    """The analyses that a run has something for: numbers of neighbours are varied only where somebody request for it."""
    return [name for name in ANALYSES if name != "neighbours" or len(existing_variants(run)) > 2]


def make_request(
    run: FinishedRun, split: HeldOut, model: str, first: int | None = None, length: int | None = None
) -> AnalysisRequest:
    """What a user wants to look at; refuses what the run does not have."""
    with_memory = [each for each in run.rows if run.result(each)["without_long_term_memory"]]
    if model not in with_memory:
        raise InputError(f"--model {model}: it has no long-term memory; take one of {', '.join(with_memory)}")
    count = len(run.corpus.split(split))
    if first is not None and first >= count:
        raise InputError(f"--first {first:,}: {split} has {count:,} tokens; give less")
    passage = None if first is None and length is None else passage_of(run, split, length or _LENGTH, first)
    return AnalysisRequest(run, split, model, passage)


def find_analysis(name: str) -> Callable[[AnalysisRequest], Analysis]:
    """Returns an analysis by its name."""
    if name not in ANALYSES:
        raise InputError(f"there is no analysis {name!r}; take of {', '.join(ANALYSES)}")
    return ANALYSES[name]


def study(request: AnalysisRequest, names: list[str], folder: Path, console: Console) -> None:
    """Makes some analyses, prints them and writes their files."""
    for analysis in [find_analysis(name) for name in names]:
        found = analysis(request)
        found.print(console)
        found.write(folder)
