"""The style of pictures, and saving them: the same on every machine, byte for byte."""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spalm.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
else:  # matplotlib takes half a second to import, so it is imported when a picture is drawn
    Axes = Figure = Text = Any

COLOURS = ["#3567b0", "#d9772b", "#2f9470", "#b5468b", "#8a6d1f", "#6b6b6b"]
"""Colours of series. Colour-blind readers can tell them apart, on white and on black."""
HIT, LOSS = "#2f9470", "#c0483d"
"""Colours of retrieved tokens that are the actual one, and of losses."""
_INK = "#1a2b3c"
"""Colour of text and axes; in a page it is replaced by the page's own colour."""

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
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
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=COLOURS)}), warnings.catch_warnings():
        # A token may hold any character; one that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def draw_figure(draw: Callable[[Axes], None], width: float, height: float) -> Figure:
    """Returns a picture of a given size in inches, drawn by `draw`."""
    from matplotlib.figure import Figure

    with _styled():
        figure = Figure((width, height), layout="constrained")
        draw(figure.subplots())
    return figure


def set_log2_axis(axes: Axes, places: Sequence[int]) -> None:
    """Makes the x axis logarithmic, with ticks at `places`."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()


def printable(text: str) -> str:
    """Returns a text with characters that cannot be drawn replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a picture to PATH.png and PATH.svg."""
    with _styled():
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            content = io.BytesIO()
            figure.savefig(content, format=suffix[1:], metadata=metadata, facecolor="white")
            write_atomically(path.with_name(path.name + suffix), content.getvalue())


def inline_svg(figure: Figure, label: str, prefix: str) -> str:
    """Returns a picture as SVG for a page: transparent, in the page's colour, its ids made unique by `prefix`."""
    content = io.StringIO()
    with _styled():
        figure.savefig(content, format="svg", metadata={"Date": None}, transparent=True)
    svg = content.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _adapt_tag(tag.group(), prefix), svg)  # tags only: text stays as it is
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    assert size is not None
    svg = svg.replace(size.group(), f'style="width: {float(size.group(1)) * 4 / 3:.0f}px"', 1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _adapt_tag(tag: str, prefix: str) -> str:
    """Returns a tag in the page's colour, its ids and references prefixed."""
    tag = tag.replace(_INK, "currentColor")
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\1{prefix}-", tag)


def write_text(axes: Axes, x: float, y: float, *, text: str, **style: Any) -> Text:
    """Writes text literally: a dollar sign does not begin a formula."""
    return axes.text(x, y, printable(text), parse_math=False, **style)
