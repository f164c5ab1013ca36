"""The models and the memory compared: all pairs of models, neighbours that are right, what ablation costs, training."""

import json
import math

import numpy as np
from matplotlib.axes import Axes

from spalm.artifact import Artifact
from spalm.corpus import SPLITS, Split
from spalm.study.analysis import Analysis, Asked, Cell, Tabular
from spalm.study.drawing import COLOURS, powers_of_two, write_text
from spalm.study.evaluate import figures
from spalm.study.significance import wilcoxon

_ROWS = 1 << 19


def all_pairs(asked: Asked) -> Analysis:
    """Wilcoxon's signed-rank test between every two models."""
    models = asked.run.models
    values = {model: asked.run.log_probabilities(model, asked.split) for model in models}
    rows: list[list[Cell]] = []
    for number, one in enumerate(models):
        for other in models[number + 1 :]:
            gain = float((values[other] - values[one]).mean())
            rows.append([one, other, gain, wilcoxon(values[one], values[other])])
    return Analysis(
        "significance",
        "Every model against every other",
        f"Mean gain in log-probability per token of {asked.split} (nats) of the second model over the first, and p of "
        "Wilcoxon's signed-rank test (two-sided) on the same tokens. In the picture: the gain of a column's model over "
        "a row's; n.s.: p of 0.05 or more.",
        {"pairs": Tabular(["model", "against", "gain", "p"], rows)},
        lambda axes: _draw_pairs(axes, models, rows),
        (6.4, 4.2),
        {"split": asked.split},
    )


def _draw_pairs(axes: Axes, models: list[str], rows: list[list[Cell]]) -> None:
    gains = np.zeros((len(models), len(models)))
    for one, other, gain, p in rows:
        i, j = models.index(one), models.index(other)
        gains[i, j], gains[j, i] = gain, -gain
        for x, y, value in ((j, i, gain), (i, j, -gain)):
            write_text(axes, x, y, f"{value:+.3f}" if p < 0.05 else "n.s.", ha="center", va="center", fontsize=8)
    most = max(1e-9, float(np.abs(gains).max()))
    axes.imshow(gains, cmap="RdYlGn", vmin=-most, vmax=most, alpha=0.55)
    axes.set_xticks(range(len(models)), models, rotation=30, ha="right")
    axes.set_yticks(range(len(models)), models)


def neighbour_matches(asked: Asked) -> Analysis:
    """How often a neighbour's token is the one that comes, by rank, on train, dev and test."""
    shares = {split: _matches(asked, split) for split in SPLITS}
    ranks = max(map(len, shares.values()))
    rows: list[list[Cell]] = [
        [rank + 1, *(shares[split][rank] if rank < len(shares[split]) else None for split in SPLITS)]
        for rank in range(ranks)
    ]
    return Analysis(
        "matches",
        "How often a neighbour is right",
        "Share of positions whose neighbour of that rank was followed by the token that comes. Training positions look "
        "outside of what is excluded for them; if they did better than dev, the gate would learn to trust too much.",
        {"ranks": Tabular(["rank", *SPLITS], rows)},
        lambda axes: _draw_matches(axes, shares),
    )


def _matches(asked: Asked, split: Split) -> list[float]:
    """By rank, among the positions that have a neighbour of that rank."""
    run, text = asked.run, asked.run.corpus.split(split)
    entries = run.memory.entries()
    right = there = np.zeros(run.neighbours.array(f"{split}.ids").shape[1], np.int64)
    for start in range(0, len(text), _ROWS // right.size):
        rows = np.arange(start, min(len(text), start + _ROWS // right.size))
        places = entries.rows(run.neighbours.read(split, rows)[0])
        hits = entries.take_tokens(places.clip(0)) == text.targets(rows)[:, None]
        right, there = right + (hits & (places >= 0)).sum(0), there + (places >= 0).sum(0)
    return (right / np.maximum(1, there)).tolist()


def _draw_matches(axes: Axes, shares: dict[Split, list[float]]) -> None:
    for number, (split, values) in enumerate(shares.items()):
        axes.plot(
            range(1, len(values) + 1), [100 * value for value in values], "o-", ms=3, lw=1.2, label=split,
            color=COLOURS[number],
        )  # fmt: skip
    powers_of_two(axes, [2**power for power in range(max(map(len, shares.values())).bit_length())])
    axes.set_xlabel("rank of the neighbour")
    axes.set_ylabel("% right")
    axes.set_ylim(bottom=0)
    axes.legend()


def cost_of_ablation(asked: Asked) -> Analysis:
    """Every model with and without its long-term memory."""
    run, split, text = asked.run, asked.split, asked.run.corpus.split(asked.split)
    rows: list[list[Cell]] = []
    for model in run.models:
        ablated = (run.row(model)["without_long_term_memory"] or {}).get(split)
        found = figures(run.log_probabilities(model, split), text)[run.unit]
        rows.append([model, found, ablated, None if ablated is None else 100 * (ablated / found - 1)])
    return Analysis(
        "ablation",
        "What it costs to take the memory away",
        f"{run.unit} on {split} with the long-term memory and without it. A model that learned to lean on its memory "
        "is worse without it than one that never had any.",
        {"models": Tabular(["model", "with", "without", "% worse without"], rows)},
        lambda axes: _draw_ablation(axes, rows, run.unit),
        data={"split": split, "unit": run.unit},
    )


def _draw_ablation(axes: Axes, rows: list[list[Cell]], unit: str) -> None:
    places = np.arange(len(rows))
    axes.bar(places - 0.2, [row[1] for row in rows], 0.38, label="with memory", color=COLOURS[0])
    axes.bar(places + 0.2, [row[2] or math.nan for row in rows], 0.38, label="without", color=COLOURS[1])
    axes.set_xticks(places, [row[0] for row in rows])
    axes.set_ylabel(unit)
    axes.legend()


def training_curves(asked: Asked) -> Analysis:
    """The losses of the models that were trained, from their logs."""
    points: dict[str, dict[str, list[list[float]]]] = {}
    rows: list[list[Cell]] = []
    for model in ("transformer", "transformer-xl", "spalm"):
        trained = Artifact(asked.run.directory / model)
        lines = [json.loads(line) for line in (trained.directory / "metrics.jsonl").read_text().splitlines()]
        points[model] = {
            name: [[line["step"], line[key]] for line in lines if line.get(key) is not None]
            for name, key in (("train", "loss"), ("dev", "dev_loss"))
        }
        rows += [[model, int(step), loss] for step, loss in points[model]["dev"]]
    return Analysis(
        "curves",
        "Training",
        "Loss in nats per token: training (thin) and dev (dots). SPALM takes over from transformer-xl's parameters "
        "where its line begins.",
        {"dev": Tabular(["model", "step", "dev loss"], rows)},
        lambda axes: _draw_curves(axes, points),
        data={"points": points},
    )


def _draw_curves(axes: Axes, points: dict) -> None:
    for number, (model, series) in enumerate(points.items()):
        axes.plot(*zip(*series["train"]), lw=0.8, alpha=0.5, color=COLOURS[number]) if series["train"] else None
        axes.plot(*zip(*series["dev"]), "o-", ms=4, label=model, color=COLOURS[number]) if series["dev"] else None
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
