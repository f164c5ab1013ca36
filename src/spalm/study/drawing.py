"""How pictures look, and how they are saved: the same on every machine, byte for byte."""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from spalm.artifact import write_atomically

COLOURS = ["#3567b0", "#d9772b", "#2f9470", "#b5468b", "#8a6d1f", "#6b6b6b"]
"""Told apart by people who see colours differently, on white and on black."""
HIT, LOSS = "#2f9470", "#c0483d"
_INK = "#1a2b3c"
"""Text and axes. In a page they take the page's own colour."""

_STYLE = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "savefig.dpi": 160,
    "svg.fonttype": "none",
    "svg.hashsalt": "spalm",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


@contextmanager
def _styled() -> Iterator[None]:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A token may hold any sign there is; what the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def drawn(draw: Callable[[Axes], None], width: float, height: float) -> Figure:
    """A picture of so many inches."""
    with _styled():
        made = Figure((width, height), layout="constrained")
        draw(made.subplots())
    return made


def powers_of_two(axes: Axes, places: Sequence[int]) -> None:
    """A logarithmic axis of counts, with a few of them named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()


def plain(text: str) -> str:
    """A token for a picture: without signs that no picture can hold."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def save(made: Figure, path: Path) -> None:
    """As PATH.png and PATH.svg."""
    with _styled():
        for end, about in ((".png", {"Software": None}), (".svg", {"Date": None})):
            content = io.BytesIO()
            made.savefig(content, format=end[1:], metadata=about, facecolor="white")
            write_atomically(path.with_name(path.name + end), content.getvalue())


def inline(made: Figure, label: str, prefix: str) -> str:
    """As SVG to be put into a page: transparent, in the page's colour, its ids kept apart from others' by `prefix`."""
    content = io.StringIO()
    with _styled():
        made.savefig(content, format="svg", metadata={"Date": None}, transparent=True)
    svg = content.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _own_names(tag.group(), prefix), svg)  # tags only: text stays as it is
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    assert size is not None
    svg = svg.replace(size.group(), f'style="width: {float(size.group(1)) * 4 / 3:.0f}px"', 1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _own_names(tag: str, prefix: str) -> str:
    """A tag in the page's colour, its names and references made this picture's own."""
    tag = tag.replace(_INK, "currentColor")
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\1{prefix}-", tag)


def write_text(axes: Axes, x: float, y: float, text: str, **about) -> Text:
    """Text as it is: a dollar sign is no mathematics."""
    return axes.text(x, y, plain(text), parse_math=False, **about)
