"""The results of a run: one row for each model and memory length, as data and as a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from typing_extensions import TypedDict

from spalm.corpus import Corpus
from spalm.files import write_json
from spalm.lm import TrainedModel
from spalm.manifest import Count, Digest
from spalm.runs.evaluation import Unit, in_all_units
from spalm.runs.recipe import PaperRow
from spalm.runs.records import Records
from spalm.runs.rows import HELD_OUT, KEY_NETWORK, HeldOut, Row, RowName
from spalm.runs.significance import wilcoxon
from spalm.semiparametric import TrainedSpalm

RESULTS = "results.json"
"""File that holds the results of a run."""
ResultRow = TypedDict(
    "ResultRow",
    {
        "model": RowName,
        "dev": float,
        "test": float,
        "unit": Unit,
        "parameters": int,
        "memory_length": Count,
        "memory_length_in_training": int,
        "lambda": float | None,
        "temperature": float | None,
        "neighbours": int | None,
        "without_long_term_memory": dict[HeldOut, float] | None,
        "p_against_transformer_xl": float | None,
        "more_texts_in_memory": int,
        "steps": int,
        "best_step": int,
        "seed": int,
        "all_units": dict[HeldOut, dict[Unit, float]],
        "evaluation": Annotated[str, Field(pattern=r"^evaluation/[A-Za-z0-9+_-]+$")],
        "records": Digest,
    },
)
"""A row as it stands in results.json.

`evaluation` is the folder of its records within the run and `records` their digest; `lambda` and `temperature` are
those of kNN-LM; `neighbours` is the number that the row uses, that of the mixture where there is one. Earlier versions
gave `neighbours` for kNN-LM only.
"""
_SMALLEST_P = 1e-9
"""Smaller p-values are printed as less than this."""
_WIDEST = 1000
"""Characters of the widest table."""


def result_row(
    row: Row,
    trained: TrainedModel | TrainedSpalm,
    records: Mapping[RowName, Records],
    *,
    corpus: Corpus,
    unit: Unit,
) -> ResultRow:
    """Returns one row: dev and test in the recipe's unit, and everything needed to read and repeat it.

    `records` holds the row's own scores, those of its network alone, and those of the row it is compared with.
    """
    training, own = trained.model_settings.training, records[row.name]
    found: dict[HeldOut, dict[Unit, float]] = {
        split: in_all_units(own.log_probabilities(split), corpus.split(split)) for split in HELD_OUT
    }
    knn = own.facts.get("knn", {})
    p = None
    if row.compared_with is not None:
        reference = records[row.compared_with]
        p = wilcoxon(own.log_probabilities("test"), reference.log_probabilities("test"))
    return {
        "model": row.name,
        "dev": found["dev"][unit],
        "test": found["test"][unit],
        "unit": unit,
        "parameters": trained.parameters,
        "memory_length": own.settings["memory_length"],
        "memory_length_in_training": training.memory_length,
        "lambda": knn.get("weight"),
        "temperature": knn.get("temperature"),
        "neighbours": _neighbours(row, trained, own),
        "without_long_term_memory": _ablated(row, records[row.network], corpus, unit=unit),
        "p_against_transformer_xl": p,
        "more_texts_in_memory": 0,
        "steps": training.steps,
        "best_step": trained.facts["best_step"],
        "seed": training.seed,
        "all_units": found,
        "evaluation": f"evaluation/{own.directory.name}",
        "records": own.digest,
    }


def _neighbours(row: Row, trained: TrainedModel | TrainedSpalm, own: Records) -> int | None:
    """Returns the number of neighbours that a row uses, that of its mixture if it has one; None if it uses none."""
    if row.mixture == "knn":
        return own.facts["knn"]["count"]
    if row.mixture == "adaptive":
        return own.facts["neighbours"] or None
    return attended_at_test(trained, own) if row.gated and isinstance(trained, TrainedSpalm) else None


def attended_at_test(trained: TrainedSpalm, records: Records) -> int:
    """Returns the number of neighbours that a SPALM attended to when its records were made."""
    chosen = records.settings["neighbours"]
    return trained.model_settings.spalm.gate.attended if chosen is None else chosen


def without_memory(row: Row, network: Records, split: HeldOut) -> np.ndarray | None:
    """Returns the log-probabilities of a row without its long-term memory, from the records of its network.

    None if the row has no long-term memory.
    """
    if not row.has_memory:
        return None
    return network.of(split, "without_memory") if row.gated else network.log_probabilities(split)


def _ablated(row: Row, network: Records, corpus: Corpus, *, unit: Unit) -> dict[HeldOut, float] | None:
    """Returns the figures of a row without its long-term memory; None if it has none."""
    if not row.has_memory:
        return None
    figures: dict[HeldOut, float] = {}
    for split in HELD_OUT:
        alone = without_memory(row, network, split)
        assert alone is not None
        figures[split] = in_all_units(alone, corpus.split(split))[unit]
    return figures


def write_results(rows: list[ResultRow], directory: Path) -> None:
    """Writes the rows to results.json."""
    write_json(directory / RESULTS, rows)


def print_results(rows: list[ResultRow], title: str, paper: list[PaperRow], *, console: Console) -> None:
    """Prints the table of a run, with the paper's figures beside ours where the recipe has them."""
    table = Table(title=title, caption="\n".join(_notes(rows)) or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.pad_edge = False
    table.title_justify = table.caption_justify = "left"
    table.add_column("model")
    names = ["M", "size", "k", "lambda", "dev", "test", "ablated", "p"]
    for name in (*names, *(("paper dev", "paper test") if paper else ())):
        table.add_column(name, justify="right")
    by_name = {(each.model, each.memory_length): each for each in paper}
    for row in rows:
        cells = _cells(row)
        if paper:
            theirs = by_name.get((row["model"], row["memory_length"]))
            cells += ["", ""] if theirs is None else [str(theirs.dev), str(theirs.test)]
        table.add_row(*cells)
    # Figures are not broken into two lines, nor cut, where the console is narrower than the table.
    table.width = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    console.print(table, crop=False)


def _notes(rows: list[ResultRow]) -> list[str]:
    """Returns the lines below the table."""
    notes = [f"{rows[0]['unit']}; M: length of the short-term memory; size: number of parameters"] if rows else []
    if any(row["neighbours"] for row in rows):
        notes.append("k: number of neighbours")
    if note := key_network_note(rows):
        notes.append(note)
    if any(row["without_long_term_memory"] for row in rows):
        notes.append("ablated: test, with the long-term memory taken away")
    if any(row["p_against_transformer_xl"] is not None for row in rows):
        notes.append("p: Wilcoxon's test on test, against transformer-xl with the same M")
    if any(row["more_texts_in_memory"] for row in rows):
        notes.append("the memory holds texts besides the training text: these are not the static figures of the corpus")
    return notes


def key_network_note(rows: list[ResultRow]) -> str | None:
    """Returns a line about the network that rows with neighbours need besides their own; None if no row has any."""
    keys = next((row for row in rows if row["model"] == KEY_NETWORK), None)
    if keys is None or not any(row["neighbours"] for row in rows):
        return None
    size, steps = _millions(keys["parameters"]), keys["steps"]
    return f"rows with neighbours also need the transformer ({size} parameters, {steps:,} steps) that makes the keys"


def _cells(row: ResultRow) -> list[str]:
    """Returns a row as it is printed."""
    digits = 3 if row["unit"] == "bits/character" else 2
    ablated, p = row["without_long_term_memory"], row["p_against_transformer_xl"]
    return [
        row["model"],
        f"{row['memory_length']:,}",
        _millions(row["parameters"]),
        f"{row['neighbours']:,}" if row["neighbours"] else "",
        "" if row["lambda"] is None else f"{row['lambda']:.2f}",
        f"{row['dev']:.{digits}f}",
        f"{row['test']:.{digits}f}",
        "" if ablated is None else f"{ablated['test']:.{digits}f}",
        "" if p is None else "<1e-9" if p < _SMALLEST_P else f"{p:.2g}",
    ]


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count:,}"
