"""Neighbour strips (the paper's figures 2 and 3): a passage, and below each token the tokens of its neighbours."""

from typing import Any

from spalm.corpus import visible_token
from spalm.runs.passage import passage_of, retrieved_tokens
from spalm.study.analysis import Analysis, AnalysisRequest, DataTable
from spalm.study.drawing import HIT, Axes, write_text

Lines = list[list[str | None]]
"""For each token: the token itself and the tokens of its neighbours; None where there are fewer neighbours."""

_WORDS = 48
"""Number of tokens in the passage where tokens are words or parts of words."""
_CHARACTERS = 96
"""Number of tokens in the passage where tokens are characters."""
_LINE = 72
"""Number of characters in a line of the picture."""


def neighbour_strips(request: AnalysisRequest) -> Analysis:
    """Shows a passage with the tokens that its neighbours proposed."""
    run, split = request.run, request.split
    text, tokeniser = run.corpus.split(split), run.corpus.tokeniser
    characters = run.unit == "bits/character"
    rows = (
        request.passage
        if request.passage is not None
        else passage_of(run, split, _CHARACTERS if characters else _WORDS)
    )
    spalm = run.records("spalm")
    count = spalm.of(split, "neighbours").shape[1]
    targets = text.targets(rows).tolist()
    proposed = retrieved_tokens(spalm, split, rows, entries=run.memory.entries())
    lines = [
        [
            visible_token(tokeniser, target),
            *(visible_token(tokeniser, token) for token in tokens),
            *([None] * (count - len(tokens))),
        ]
        for target, tokens in zip(targets, proposed)
    ]
    hits = [[token == target for token in tokens] for target, tokens in zip(targets, proposed)]
    right = sum(any(row) for row in hits)
    document, offset = text.document_of(int(rows[0]))
    layout = _layout(lines)
    return Analysis(
        "strips",
        "Neighbours of a passage",
        f"{document} ({request.where}), from token {offset:,}. First line: the text; below each token, the tokens that "
        f"followed its {count} nearest contexts in the memory, nearest first. Green: the token that came; some "
        f"neighbour is right at {right} of {len(rows)} tokens.",
        {"tokens": DataTable(["token", *(f"neighbour {rank}" for rank in range(1, count + 1))], lines)},
        lambda axes: _draw(axes, lines, hits, layout=layout, count=count),
        (8.4, 0.25 * len(layout) * (count + 1.7) + 0.1),
        {"split": split, "first_position": int(rows[0]), "hits": hits},
    )


def _widths(lines: Lines) -> list[float]:
    """Returns the width of each token's column, in characters."""
    return [max(len(cell) for cell in line if cell is not None) + 1.0 for line in lines]


def _layout(lines: Lines) -> list[tuple[int, int]]:
    """Returns the range of tokens, as (start, stop), in each line of the picture."""
    found, start, used = [], 0, 0.0
    for number, width in enumerate(_widths(lines)):
        if used + width > _LINE and number > start:
            found.append((start, number))
            start, used = number, 0.0
        used += width
    return [*found, (start, len(lines))]


def _draw(axes: Axes, lines: Lines, hits: list[list[bool]], *, layout: list[tuple[int, int]], count: int) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, _LINE)
    axes.set_ylim(len(layout) * (count + 1.7), 0)
    widths = _widths(lines)
    for number, (start, stop) in enumerate(layout):
        x, top = 0.0, number * (count + 1.7)
        for column in range(start, stop):
            _draw_column(axes, lines[column], hits[column], x=x, top=top, width=widths[column])
            x += widths[column]


def _draw_column(axes: Axes, line: list[str | None], hits: list[bool], *, x: float, top: float, width: float) -> None:
    from matplotlib.patches import Rectangle

    style: dict[str, Any] = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 8}
    middle = x + width / 2
    write_text(axes, middle, top + 0.5, text=line[0] or "", weight="bold", **style)
    for rank, token in enumerate(line[1:]):
        if token is None:
            continue
        right = hits[rank]
        if right:
            axes.add_patch(Rectangle((x + 0.15, top + rank + 1.05), width - 0.3, 0.9, color=HIT, alpha=0.3, lw=0))
        write_text(axes, middle, top + rank + 1.5, text=token, alpha=1.0 if right else 0.6, **style)
