"""The verb that uses the join of neighbours alone, for vectors of any origin."""

from pathlib import Path
from typing import Annotated

import typer

from spalm.choices import MetricName
from spalm.cli.application import app
from spalm.cli.options import Ram, Restart, Threads, given_path
from spalm.console import print_json


@app.command(name="knn")
def knn_(
    vectors: Annotated[
        Path,
        typer.Argument(
            parser=given_path, metavar="VECTORS", help=".npy, .fvecs, .fbin, .f16bin, .bf16bin, .i8bin or .u8bin."
        ),
    ],
    out: Annotated[Path, typer.Option(parser=given_path, help="Folder for the graph.")],
    k: Annotated[int, typer.Option(help="Number of neighbours of every vector.", min=1, max=100)] = 15,
    recall: Annotated[float, typer.Option(help="Share of the true neighbours to find.")] = 0.95,
    metric: Annotated[
        MetricName, typer.Option(help="l2: Euclidean; cosine: 1 - cosine; ip: the greatest inner products.")
    ] = "l2",
    queries: Annotated[
        Path | None,
        typer.Option(parser=given_path, help="File of vectors whose neighbours are wanted; default: VECTORS itself."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random samples.", min=0)] = 1,
    ram: Ram = None,
    threads: Threads = None,
    restart: Restart = False,
) -> None:
    """Find the k nearest neighbours of every vector in a file, at a chosen recall; resumes if it was killed."""
    from spalm.compute import Execution, Hardware
    from spalm.neighbours import knn_graph

    execution = Execution(Hardware("cpu", threads), restart=restart)
    graph = knn_graph(
        vectors, k, queries=queries, out=out, execution=execution, recall=recall, metric=metric, ram=ram, seed=seed
    )
    rows, count = graph.indices.shape
    facts = {"rows": rows, "k": count, "metric": graph.metric, "recall": graph.recall, "judged": graph.judged}
    print_json({**facts, "out": str(out)})
