"""All analyses by name; making requests for them and running them."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from spalm.errors import InputError
from spalm.runs import FinishedRun, HeldOut, RowName
from spalm.runs.passage import passage_of
from spalm.study.analyses.ablation import ablation_cost
from spalm.study.analyses.by_neighbours import by_neighbours, existing_variants
from spalm.study.analyses.by_strength import by_strength, existing_levels
from spalm.study.analyses.curves import training_curves
from spalm.study.analyses.gates import gate_heatmap, gate_histogram
from spalm.study.analyses.matches import neighbour_matches
from spalm.study.analyses.outputs import output_analysis
from spalm.study.analyses.overlap import attached_overlap, verbatim_overlap
from spalm.study.analyses.significance import pairwise_significance
from spalm.study.analyses.slices import by_frequency, by_position
from spalm.study.analyses.strips import neighbour_strips
from spalm.study.analysis import Analysis, AnalysisRequest

AnalysisFunction = Callable[[AnalysisRequest], Analysis]
ANALYSES: dict[str, AnalysisFunction] = {
    "strips": neighbour_strips,
    "outputs": output_analysis,
    "gates": gate_histogram,
    "heatmap": gate_heatmap,
    "neighbours": by_neighbours,
    "strength": by_strength,
    "matches": neighbour_matches,
    "overlap": verbatim_overlap,
    "significance": pairwise_significance,
    "position": by_position,
    "frequency": by_frequency,
    "ablation": ablation_cost,
    "curves": training_curves,
}
"""All analyses, in the order of the report."""
_LENGTH = 48
"""Number of tokens of a passage."""


def available_analyses(run: FinishedRun) -> list[str]:
    """Returns the analyses for which a run has data.

    "neighbours" is among them only after `vary_neighbours`, and "strength" only after `vary_steps`.
    """
    varied = {"neighbours": len(existing_variants(run)) > 2, "strength": len(existing_levels(run)) > 1}
    return [name for name in ANALYSES if varied.get(name, True)]


def make_request(
    run: FinishedRun, split: HeldOut, model: RowName, *, first: int | None = None, length: int | None = None
) -> AnalysisRequest:
    """Returns a request for a passage of `length` tokens from `first` on; refuses what the run does not have."""
    with_memory = [each for each in run.rows if run.result(each)["without_long_term_memory"]]
    if model not in with_memory:
        raise InputError(f"--model {model}: it has no long-term memory; take one of {', '.join(with_memory)}")
    count = len(run.corpus.split(split))
    if first is not None and first >= count:
        raise InputError(f"--first {first:,}: {split} has {count:,} tokens; give less")
    passage = None if first is None and length is None else passage_of(run, split, length or _LENGTH, first=first)
    return AnalysisRequest(run, split, model, passage)


def find_analysis(name: str) -> AnalysisFunction:
    """Returns an analysis by its name."""
    if name not in ANALYSES:
        raise InputError(f"there is no analysis {name!r}; take of {', '.join(ANALYSES)}")
    return ANALYSES[name]


def run_analyses(request: AnalysisRequest, names: list[str], folder: Path, *, console: Console) -> None:
    """Makes some analyses, prints them and writes their files."""
    for analyse in [find_analysis(name) for name in names]:  # refuses an unknown name before any analysis
        found = analyse(request)
        found.print(console)
        found.write(folder)


def analyse_attached(directory: Path, names: list[str], folder: Path, *, console: Console) -> None:
    """Makes the analysis that a pretrained model with a memory has data for; refuses all others."""
    if others := [name for name in names if name != "overlap"]:
        raise InputError(
            f"{directory} is a pretrained model with a memory: only overlap can be analysed, not {', '.join(others)}"
        )
    found = attached_overlap(directory)
    found.print(console)
    found.write(folder)
