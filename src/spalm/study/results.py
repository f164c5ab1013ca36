"""The rows of a run, as data and as a table."""

from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from spalm.artifact import write_json
from spalm.corpus import Corpus
from spalm.lm import TrainedModel
from spalm.semiparametric import HELD_OUT, RESULTS, Records, TrainedSpalm
from spalm.study.evaluate import Unit, figures
from spalm.study.significance import wilcoxon


def row(
    model: str,
    trained: TrainedModel | TrainedSpalm,
    records: Records,
    corpus: Corpus,
    unit: Unit,
    reference: Records | None = None,
    ablated: dict[str, np.ndarray] | None = None,
    more_texts: int = 0,
) -> dict[str, Any]:
    """One row: dev and test in the recipe's unit, and everything needed to read and repeat it.

    `reference` are the records of transformer-XL with the same memory; `ablated` the log-probabilities of the same
    model with its long-term memory taken away; `more_texts` how many texts it holds besides the training text.
    """
    training = trained.model_settings.training
    found = {split: figures(records.log_probabilities(split), corpus.split(split)) for split in HELD_OUT}
    knn = records.facts.get("knn", {})
    without = {split: figures(array, corpus.split(split))[unit] for split, array in (ablated or {}).items()}
    return {
        "model": model,
        "dev": found["dev"][unit],
        "test": found["test"][unit],
        "unit": unit,
        "parameters": trained.parameters,
        "memory_length": records.settings["memory_length"],
        "memory_length_in_training": training.memory_length,
        "lambda": knn.get("weight"),
        "temperature": knn.get("temperature"),
        "neighbours": knn.get("count"),
        "without_long_term_memory": without or None,
        "p_against_transformer_xl": None
        if reference is None
        else wilcoxon(records.log_probabilities("test"), reference.log_probabilities("test")),
        "more_texts_in_memory": more_texts,
        "steps": training.steps,
        "best_step": trained.facts["best_step"],
        "seed": training.seed,
        "all_units": found,
        "evaluation": f"evaluation/{records.directory.name}",
        "records": records.digest,
    }


def write_results(rows: list[dict[str, Any]], directory: Path) -> None:
    write_json(directory / RESULTS, rows)


def print_results(rows: list[dict[str, Any]], title: str, paper: list[dict[str, Any]], console: Console) -> None:
    """The table of a run, with the paper's figures beside ours where the recipe has them."""
    notes = [f"{rows[0]['unit']}; M: length of the short-term memory"] if rows else []
    if any(each["without_long_term_memory"] for each in rows):
        notes.append("ablated: test, with the long-term memory taken away")
    if any(each["p_against_transformer_xl"] is not None for each in rows):
        notes.append("p: Wilcoxon's test on test, against transformer-xl with the same M")
    if any(each["more_texts_in_memory"] for each in rows):
        notes.append("the memory holds texts besides the training text: these are not the static figures of the corpus")
    table = Table(title=title, caption="\n".join(notes) or None, box=box.SIMPLE_HEAD, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.add_column("model", no_wrap=True)
    names = ["M", "parameters", "lambda", "dev", "test", "ablated", "p"]
    for name in (*names, *(("paper dev", "paper test") if paper else ())):
        table.add_column(name, justify="right")
    for each in rows:
        digits = 3 if each["unit"] == "bits/character" else 2
        ablated, p = each["without_long_term_memory"], each["p_against_transformer_xl"]
        cells = [
            each["model"],
            f"{each['memory_length']:,}",
            _millions(each["parameters"]),
            "" if each["lambda"] is None else f"{each['lambda']:.2f}",
            f"{each['dev']:.{digits}f}",
            f"{each['test']:.{digits}f}",
            "" if ablated is None else f"{ablated['test']:.{digits}f}",
            "" if p is None else "<1e-9" if p < 1e-9 else f"{p:.2g}",
        ]
        if paper:
            same = [p for p in paper if (p["model"], p["memory_length"]) == (each["model"], each["memory_length"])]
            cells += [str(same[0][split]) if same else "" for split in ("dev", "test")]
        table.add_row(*cells)
    console.print(table)


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count:,}"
