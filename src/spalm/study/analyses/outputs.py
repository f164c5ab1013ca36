"""Output analysis (the paper's section 5.2): which tokens the two memories help, and which they harm.

A token gains from a memory if its probability rises by at least 0.1 when the memory is added, and loses if it falls by
as much: short-term is transformer-XL against the transformer, long-term is SPALM against transformer-XL.
"""

from typing import Any

import numpy as np

from spalm.corpus import visible_token
from spalm.runs import KEY_NETWORK, REFERENCE_ROW
from spalm.study.analyses.slices import frequency_bins
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, LOSS, Axes

THRESHOLD = 0.1
"""Least change of a probability that counts as a gain or a loss."""
_TOKENS = 20
"""Number of tokens in the list of gainers and in that of losers."""


def output_analysis(request: AnalysisRequest) -> Analysis:
    """Counts gains and losses by frequency of the token, and lists the tokens with most of them."""
    run, split, long = request.run, request.split, request.model
    plain, short, both = (np.exp(run.log_probabilities(model, split)) for model in (KEY_NETWORK, REFERENCE_ROW, long))
    targets = run.corpus.split(split).targets(np.arange(len(plain)))
    kinds = {
        "short-term gains": short - plain >= THRESHOLD,
        "short-term losses": plain - short >= THRESHOLD,
        "long-term gains": both - short >= THRESHOLD,
        "long-term losses": short - both >= THRESHOLD,
        "both above transformer": (short - plain >= THRESHOLD) & (both - plain >= THRESHOLD),
    }
    bins = frequency_bins(run, targets)
    rows: list[list[Cell]] = []
    for name, here in [*bins.items(), ("all", np.ones(len(targets), bool))]:
        rows.append([name, int(here.sum()), *(int((kind & here).sum()) for kind in kinds.values())])
    counts = DataTable(["comes in training", "positions", *kinds], rows, "positions by how often their token comes")
    difference = run.log_probabilities(long, split) - run.log_probabilities(REFERENCE_ROW, split)
    tables = {"counts": counts}
    for name, kind in (("gainers", "long-term gains"), ("losers", "long-term losses")):
        tables[name] = _most_affected(request, targets, kinds, difference=difference, kind=kind)
    return Analysis(
        "outputs",
        "Which tokens the memories help",
        f"Tokens ({request.where}) whose probability rises (gains) or falls (losses) by at least {THRESHOLD}: "
        f"short-term is transformer-xl against transformer, long-term {long} against transformer-xl. By how often the "
        "token comes in the training text. Nats: log-probability gained by the long-term memory in all.",
        tables,
        lambda axes: _draw(axes, [row for row in rows[:-1] if row[1]], list(kinds)[:4]),
        data={"split": split, "model": long, "threshold": THRESHOLD},
    )


def _most_affected(
    request: AnalysisRequest, targets: np.ndarray, kinds: dict[str, np.ndarray], *, difference: np.ndarray, kind: str
) -> DataTable:
    """Returns the tokens with most gains or losses of a kind, "long-term gains" or "long-term losses"."""
    size, tokeniser = request.run.corpus.vocabulary, request.run.corpus.tokeniser
    counted = np.bincount(targets[kinds[kind]], minlength=size)
    positions = np.bincount(targets, minlength=size)
    gains, losses = (
        np.bincount(targets[kinds[each]], minlength=size) for each in ("long-term gains", "long-term losses")
    )
    nats = np.bincount(targets, weights=difference, minlength=size)
    order = [token for token in np.argsort(-counted, kind="stable")[:_TOKENS].tolist() if counted[token]]
    rows: list[list[Cell]] = [
        [
            visible_token(tokeniser, token),
            int(positions[token]),
            int(gains[token]),
            int(losses[token]),
            float(nats[token]),
        ]
        for token in order
    ]
    return DataTable(["token", "positions", "gains", "losses", "nats"], rows, f"tokens with most {kind}")


def _draw(axes: Axes, rows: list[list[Any]], kinds: list[str]) -> None:
    places = np.arange(len(rows))
    colours = [COLOURS[0], COLOURS[0], COLOURS[2], LOSS]
    for number, (kind, colour) in enumerate(zip(kinds, colours)):
        shares = [100 * row[2 + number] / row[1] for row in rows]
        sign = -1 if "losses" in kind else 1
        offset = -0.2 if "short" in kind else 0.2
        axes.bar(
            places + offset, np.multiply(sign, shares), 0.38, label=kind, color=colour, alpha=0.55 if sign < 0 else 1
        )
    axes.axhline(0, lw=0.8, color=COLOURS[5])
    axes.set_xticks(places, [row[0] for row in rows], rotation=20, ha="right")
    axes.set_xlabel("times that the token comes in the training text")
    axes.set_ylabel("% of positions that gain (up) or lose (down)")
    axes.legend(ncols=2, fontsize="small")
