"""The result of an analysis: tables, a caption, and a picture drawn from the same numbers.

NAME.json              all of it
NAME.csv               a table; NAME-TABLE.csv where there are several
NAME.png, NAME.svg     the picture
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spalm.digests import updating_sums
from spalm.files import write_atomically, write_json
from spalm.runs import FinishedRun, HeldOut, RowName
from spalm.study.drawing import Axes, Figure, draw_figure, save_figure

Cell = str | int | float | None
"""A cell of a table; None is shown as empty."""


@dataclass(frozen=True)
class DataTable:
    """A table of an analysis."""

    columns: list[str]
    rows: list[list[Cell]]
    title: str = ""


@dataclass(frozen=True)
class Analysis:
    """A finished analysis."""

    name: str
    title: str
    caption: str
    """Explanation of the figures, which makes the picture readable without other text."""
    tables: dict[str, DataTable]
    draw: Callable[[Axes], None]
    """Draws the picture."""
    size: tuple[float, float] = (7.0, 3.6)
    """Size of the picture in inches."""
    data: dict[str, Any] = field(default_factory=dict)
    """Numbers that are part of the result but in no table."""
    printed: int = 24
    """Number of first rows of a table that are printed; its files have all."""

    def picture(self) -> Figure:
        """Returns the picture as a figure of matplotlib."""
        return draw_figure(self.draw, *self.size)

    def _repr_png_(self) -> bytes:
        """Shows the picture in a notebook."""
        content = io.BytesIO()
        self.picture().savefig(content, format="png", facecolor="white")
        return content.getvalue()

    def print(self, console: Console) -> None:
        """Prints the tables, of long ones the first rows only, and the caption."""
        for table in self.tables.values():
            shown = Table(title=f"{self.title}: {table.title}" if table.title else self.title, box=box.SIMPLE_HEAD)
            shown.title_justify = "left"
            for number, column in enumerate(table.columns):
                left = any(isinstance(row[number], str) for row in table.rows)
                shown.add_column(column, justify="left" if left else "right")
            for row in table.rows[: self.printed]:
                shown.add_row(*(Text(format_cell(cell)) for cell in row))
            if len(table.rows) > self.printed:
                shown.caption = f"{len(table.rows) - self.printed:,} more in {self.name}.csv"
            console.print(shown)
        console.print(Text(self.caption, style="dim"))

    def write(self, folder: Path) -> None:
        """Writes the files of the analysis."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {
            name: {"title": table.title, "columns": table.columns, "rows": table.rows}
            for name, table in self.tables.items()
        }
        whole = {"title": self.title, "caption": self.caption, "tables": tables, "data": self.data}
        files = {
            name: f"{self.name}.csv" if len(self.tables) == 1 else f"{self.name}-{name}.csv" for name in self.tables
        }
        with updating_sums(folder, [*files.values(), *(f"{self.name}.{end}" for end in ("json", "png", "svg"))]):
            write_json(folder / f"{self.name}.json", whole)
            for name, table in self.tables.items():
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows([table.columns, *table.rows])
                write_atomically(folder / files[name], text.getvalue())
            save_figure(self.picture(), folder / self.name)


@dataclass(frozen=True)
class AnalysisRequest:
    """The run, split, model and passage that are to be analysed."""

    run: FinishedRun
    split: HeldOut = "test"
    model: RowName = "spalm"
    """Row whose long-term memory is analysed."""
    passage: np.ndarray | None = None
    """Positions of the passage to show; default: where the memory helped most."""

    @property
    def where(self) -> str:
        """The split and the length of the short-term memory, for captions."""
        return f"{self.split}, M = {self.run.memory_length:,}"

    @property
    def token_unit(self) -> str:
        """Unit for figures of parts of a text, in which tokens can be counted but words cannot."""
        return "bits/token" if self.run.unit == "bits/character" else "perplexity/token"

    def in_token_unit(self, log_probabilities: np.ndarray) -> float | None:
        """Returns the mean of some log-probabilities in `token_unit`; None if there are none."""
        if not len(log_probabilities):
            return None
        nats = -float(np.mean(log_probabilities, dtype=np.float64))
        return nats / float(np.log(2)) if self.token_unit == "bits/token" else float(np.exp(min(nats, 700.0)))


def format_cell(cell: Cell) -> str:
    """Returns a cell as it is printed."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.2e}" if cell and abs(cell) < 1e-3 else f"{cell:,.1f}" if abs(cell) >= 1000 else f"{cell:.3f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
