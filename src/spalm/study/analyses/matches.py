"""The share of neighbours whose token is the actual one (the paper's section 5.4)."""

import numpy as np

from spalm.corpus import SPLITS, Split
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, Axes, set_log2_axis

_CELLS = 1 << 19
"""Number of neighbours whose tokens are compared at a time."""


def neighbour_matches(request: AnalysisRequest) -> Analysis:
    """Counts how often a neighbour's token is the actual token, by rank, on train, dev and test."""
    shares: dict[Split, list[float | None]] = {split: _matches(request, split) for split in SPLITS}
    ranks = max(map(len, shares.values()))
    rows: list[list[Cell]] = [
        [rank + 1, *(shares[split][rank] if rank < len(shares[split]) else None for split in SPLITS)]
        for rank in range(ranks)
    ]
    return Analysis(
        "matches",
        "How often a neighbour is right",
        "Share of positions whose neighbour of that rank was followed by the token that comes. Training positions look "
        "outside of what is excluded for them; if they did better than dev, the gate would learn to trust too much.",
        {"ranks": DataTable(["rank", *SPLITS], rows)},
        lambda axes: _draw_matches(axes, shares),
    )


def _matches(request: AnalysisRequest, split: Split) -> list[float | None]:
    """Returns the share of right neighbours by rank, among the positions that have a neighbour of that rank."""
    run, text = request.run, request.run.corpus.split(split)
    entries = run.memory.entries()
    right = present = np.zeros(run.neighbours.array(f"{split}.ids").shape[1], np.int64)
    step = max(1, _CELLS // right.size)
    for start in range(0, len(text), step):
        rows = np.arange(start, min(len(text), start + step))
        tokens = entries.tokens_of(run.neighbours.read(split, rows)[0])
        right, present = right + (tokens == text.targets(rows)[:, None]).sum(0), present + (tokens >= 0).sum(0)
    return [hits / count if count else None for hits, count in zip(right.tolist(), present.tolist())]


def _draw_matches(axes: Axes, shares: dict[Split, list[float | None]]) -> None:
    for number, (split, values) in enumerate(shares.items()):
        percent = {rank + 1: 100 * value for rank, value in enumerate(values) if value is not None}
        axes.plot([*percent], [*percent.values()], "o-", ms=3, lw=1.2, label=split, color=COLOURS[number])
    set_log2_axis(axes, [2**power for power in range(max(map(len, shares.values())).bit_length())])
    axes.set_xlabel("rank of the neighbour")
    axes.set_ylabel("% right")
    axes.set_ylim(bottom=0)
    axes.legend()
