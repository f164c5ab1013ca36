"""Values of the gate (the paper's section 5.3): near 1 the prediction is the network's, near 0 the memory's."""

import numpy as np

from spalm.corpus import visible_token
from spalm.runs.passage import passage_of
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, Axes, printable

_BINS = 40
"""Number of bins of the histogram."""
_TOKENS = 32
"""Number of tokens in the heatmap."""
_DIMENSIONS = 64
"""Number of dimensions in the heatmap."""


def gate_histogram(request: AnalysisRequest) -> Analysis:
    """Counts the gate's values at all positions."""
    gates = request.run.records("spalm").of(request.split, "gate")
    edges = np.linspace(0, 1, _BINS + 1)
    counts, total = np.zeros(_BINS, np.int64), 0.0
    for start in range(0, len(gates), 1 << 16):
        part = np.asarray(gates[start : start + (1 << 16)], np.float32)
        counts += np.histogram(part, edges)[0]
        total += float(part.sum(dtype=np.float64))
    shares = counts / counts.sum()
    mean = total / gates.size
    rows: list[list[Cell]] = [
        [float(low), float(high), int(count), float(share)]
        for low, high, count, share in zip(edges[:-1], edges[1:], counts, shares)
    ]
    dimensions = "one value a position" if gates.shape[1] == 1 else f"{gates.shape[1]} dimensions of each position"
    return Analysis(
        "gates",
        "Values of the gate",
        f"g of SPALM ({request.where}), {dimensions}; mean {mean:.3f}. At 1 the prediction is the network's alone, at "
        "0 the memory's.",
        {"histogram": DataTable(["from", "to", "values", "share"], rows)},
        lambda axes: _draw_histogram(axes, edges, shares, mean=mean),
        data={"split": request.split, "mean": mean},
    )


def _draw_histogram(axes: Axes, edges: np.ndarray, shares: np.ndarray, *, mean: float) -> None:
    axes.bar(edges[:-1], 100 * shares, np.diff(edges), align="edge", color=COLOURS[0], alpha=0.85)
    axes.axvline(mean, color=COLOURS[1], lw=1.4, label=f"mean {mean:.2f}")
    axes.set_xlim(0, 1)
    axes.set_xlabel("g: memory (0) to network (1)")
    axes.set_ylabel("% of values")
    axes.legend()


def gate_heatmap(request: AnalysisRequest) -> Analysis:
    """Shows the gate's values token by token in a passage."""
    run, split = request.run, request.split
    rows = request.passage if request.passage is not None else passage_of(run, split, _TOKENS)
    gates = np.asarray(run.records("spalm").of(split, "gate")[rows], np.float32)
    text, tokeniser = run.corpus.split(split), run.corpus.tokeniser
    # Only the dimensions that vary most from token to token are shown; the paper also shows "a small subset".
    varied = np.sort(np.argsort(-gates.std(0), kind="stable")[:_DIMENSIONS])
    tokens = [visible_token(tokeniser, token) for token in text.targets(rows).tolist()]
    table: list[list[Cell]] = [
        [token, float(row.mean()), float(row.min()), float(row.max())] for token, row in zip(tokens, gates)
    ]
    document, offset = text.document_of(int(rows[0]))
    return Analysis(
        "heatmap",
        "The gate, token by token",
        f"{document} ({request.where}), from token {offset:,}. A row is the prediction of a token, a column a "
        f"dimension of g (the {len(varied)} that vary most of {gates.shape[1]}). Blue: near 1, the network; red: near "
        "0, the memory.",
        {"tokens": DataTable(["token", "mean", "lowest", "highest"], table)},
        lambda axes: _draw_heatmap(axes, gates[:, varied], tokens),
        (7.0, 0.17 * len(tokens) + 0.7),
        {
            "split": split,
            "first_position": int(rows[0]),
            "dimensions": varied.tolist(),
            "gates": np.round(gates[:, varied].astype(float), 4).tolist(),
        },
    )


def _draw_heatmap(axes: Axes, gates: np.ndarray, tokens: list[str]) -> None:
    image = axes.imshow(gates, cmap="RdBu", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(tokens)), [printable(token) for token in tokens], fontsize=7, parse_math=False)
    axes.set_xticks([])
    axes.set_xlabel("dimensions of g")
    axes.figure.colorbar(image, ax=axes, shrink=0.4, aspect=12)
