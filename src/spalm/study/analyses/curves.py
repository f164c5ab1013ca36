"""Training curves."""

from typing import Any

from spalm.artifact import Artifact
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, Axes
from spalm.training.run_log import read_run_log


def training_curves(request: AnalysisRequest) -> Analysis:
    """Shows the losses of the trained networks, from their logs."""
    points: dict[str, dict[str, list[list[float]]]] = {}
    rows: list[list[Cell]] = []
    for model in request.run.networks:
        trained = Artifact(request.run.directory / model)
        lines = read_run_log(trained.directory)
        points[model] = {
            name: [[line["step"], line[key]] for line in lines if line.get(key) is not None and "step" in line]
            for name, key in (("train", "loss"), ("dev", "dev_loss"))
        }
        rows += [[model, int(step), loss] for step, loss in points[model]["dev"]]
    return Analysis(
        "curves",
        "Training",
        "Loss in nats per token: training (thin) and dev (dots). A network whose line begins later takes over "
        "transformer-xl's parameters there.",
        {"dev": DataTable(["model", "step", "dev loss"], rows)},
        lambda axes: _draw_curves(axes, points),
        data={"points": points},
    )


def _draw_curves(axes: Axes, points: dict) -> None:
    for number, (model, series) in enumerate(points.items()):
        styles: dict[str, dict[str, Any]] = {
            "train": {"lw": 0.8, "alpha": 0.5},
            "dev": {"marker": "o", "ms": 4, "label": model},
        }
        for name, style in styles.items():
            if series[name]:
                axes.plot(*zip(*series[name]), color=COLOURS[number], **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
