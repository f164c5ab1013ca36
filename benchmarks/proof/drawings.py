"""The pictures of the study's report, from its results."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from proof import intervals
from proof.tables import Results, harms, perplexities
from spalm.study.drawing import COLOURS, HIT, LOSS, Axes

Drawing = Callable[[Axes], None]
"""Draws a picture."""
_LIMIT = 1.0
"""Change of perplexity in per cent above which a memory does harm."""


def draw_curves(found: Results) -> Drawing:
    """Returns what draws the change in perplexity by the number of entries with keys."""

    def draw(axes: Axes) -> None:
        for number, (name, domain) in enumerate(found.items()):
            most = max(point["wanted"]["exact"] for point in domain["points"])
            points = [point for point in domain["points"] if point["wanted"]["exact"] == most]
            points.sort(key=lambda point: point["keys"])
            changes = [perplexities(point["documents"])["adaptive"]["change"] for point in points]
            colour = COLOURS[number % len(COLOURS)]
            style = "o-" if number < len(COLOURS) else "s--"
            keys = [point["keys"] for point in points]
            axes.plot(keys, [100 * each.value for each in changes], style, color=colour, label=name)
            low, high = ([100 * getattr(each, end) for each in changes] for end in ("low", "high"))
            axes.fill_between(keys, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_xscale("log")
        axes.set_xlabel("entries with keys")
        axes.set_ylabel("change in perplexity, %")
        axes.legend(fontsize="small")

    return draw


def draw_beside(found: Results) -> Drawing:
    """Returns what draws the change in perplexity of every system."""

    def draw(axes: Axes) -> None:
        changes = {
            name: {row: value["change"] for row, value in perplexities(each["documents"]).items() if row != "plain"}
            for name, each in found.items()
        }
        rows = list(dict.fromkeys(row for each in changes.values() for row in each))
        width = 0.8 / len(found)
        for number, (name, each) in enumerate(changes.items()):
            places = [rows.index(row) + number * width for row in each]
            colour = COLOURS[number % len(COLOURS)]
            draw_bars(axes, in_percent(each.values()), places, width, label=name, colour=colour)
        axes.set_yticks(np.arange(len(rows)) + 0.4 - width / 2, rows)
        axes.set_xlabel("change in perplexity, %")
        axes.invert_yaxis()
        axes.legend(fontsize="small")

    return draw


def in_percent(values: Iterable[intervals.Interval]) -> list[intervals.Interval]:
    """Returns shares as percentages."""
    return [intervals.Interval(100 * each.value, 100 * each.low, 100 * each.high) for each in values]


def draw_bars(
    axes: Axes,
    values: Sequence[intervals.Interval],
    places: Sequence[float],
    width: float,
    *,
    label: str,
    colour: str,
) -> None:
    """Draws figures as bars with their intervals."""
    middle, low, high = (np.array([getattr(each, name) for each in values]) for name in ("value", "low", "high"))
    # Percentiles of draws can lie on one side of the figure.
    errors = np.maximum(0, [middle - low, high - middle])
    axes.barh(places, middle, width, xerr=errors, color=colour, label=label)


def draw_questions(found: Results) -> Drawing:
    """Returns what draws exact match and F1 of all ways to answer."""

    def draw(axes: Axes) -> None:
        places = np.arange(len(found["ways"]))
        for number, measure in enumerate(("exact match", "F1")):
            values = [intervals.Interval(**each["figures"][measure]) for each in found["ways"].values()]
            at = (places + number * 0.4).tolist()
            draw_bars(axes, in_percent(values), at, 0.4, label=measure, colour=COLOURS[number])
        axes.set_yticks(places + 0.2, list(found["ways"]))
        axes.set_xlabel("per cent of questions")
        axes.invert_yaxis()
        axes.legend(fontsize="small")

    return draw


def draw_harm(found: Results) -> Drawing:
    """Returns what draws the change in perplexity of everything that is not the memory's domain."""

    def draw(axes: Axes) -> None:
        others = {name: each["on"] for name, each in harms(found).items() if each is not found["own"]}
        for row, memories in enumerate(others.values()):
            for number, (each, sign) in enumerate(zip(memories.values(), "os^v")):
                percent, place = each["percent"], row + 0.25 * number
                colour = LOSS if percent["high"] > _LIMIT else HIT
                axes.plot([percent["low"], percent["high"]], [place, place], color=colour)
                axes.plot(percent["value"], place, sign, color=colour)
        axes.axvline(_LIMIT, linestyle=":", color="grey")
        axes.set_yticks(range(len(others)), list(others))
        signs = ", ".join(f"{name}: {sign}" for name, sign in zip(found["memories"], ("circle", "square")))
        axes.set_xlabel(f"change in perplexity, % (dotted: the limit; {signs})")
        axes.invert_yaxis()

    return draw


def draw_forgetting(found: Results) -> Drawing:
    """Returns what draws the membership test of added documents."""

    def draw(axes: Axes) -> None:
        for number, (kind, parts) in enumerate(found["kinds"].items()):
            states = parts["added"]["states"]
            values = [intervals.Interval(**each["membership"]) for each in states.values()]
            places = (np.arange(len(states)) + 0.4 * number).tolist()
            draw_bars(axes, values, places, 0.4, label=f"{kind} index", colour=COLOURS[number])
            axes.set_yticks(np.arange(len(states)) + 0.2, list(states))
        axes.axvline(0.5, linestyle=":", color="grey")
        axes.set_xlabel("membership test (dotted: cannot be told apart)")
        axes.invert_yaxis()
        axes.legend(fontsize="small")

    return draw
