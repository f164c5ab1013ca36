"""The rows of a run, as data and as a table."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spalm.artifact import write_json
from spalm.lm import TrainedModel
from spalm.study.evaluate import Evaluation, Unit

FILE = "results.json"


def row(model: str, trained: TrainedModel, evaluation: Evaluation, unit: Unit) -> dict[str, Any]:
    """One row: dev and test in the recipe's unit, and everything needed to read and repeat it."""
    training = trained.model_settings.training
    return {
        "model": model,
        "dev": evaluation.facts["dev"][unit],
        "test": evaluation.facts["test"][unit],
        "unit": unit,
        "parameters": trained.parameters,
        "memory_length": evaluation.settings["memory_length"],
        "memory_length_in_training": training.memory_length,
        "steps": training.steps,
        "best_step": trained.facts["best_step"],
        "seed": training.seed,
        "all_units": {split: evaluation.facts[split] for split in ("dev", "test")},
        "evaluation": f"evaluation/{evaluation.directory.name}",
    }


def write_results(rows: list[dict[str, Any]], directory: Path) -> None:
    write_json(directory / FILE, rows)


def print_results(rows: list[dict[str, Any]], title: str, paper: list[dict[str, Any]], console: Console) -> None:
    """The table of a run, with the paper's figures beside ours where the recipe has them."""
    table = Table(title=title, title_justify="left", caption=rows[0]["unit"] if rows else None, caption_justify="left")
    table.add_column("model")
    for name in ("memory M", "parameters", "dev", "test", *(("paper dev", "paper test") if paper else ())):
        table.add_column(name, justify="right")
    for each in rows:
        cells = [each["model"], f"{each['memory_length']:,}", _millions(each["parameters"])]
        cells += [f"{each[split]:.{_digits(each['unit'])}f}" for split in ("dev", "test")]
        if paper:
            same = [p for p in paper if (p["model"], p["memory_length"]) == (each["model"], each["memory_length"])]
            cells += [str(same[0][split]) if same else "" for split in ("dev", "test")]
        table.add_row(*cells)
    console.print(table)


def _digits(unit: str) -> int:
    return 3 if unit == "bits/character" else 2


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count:,}"
