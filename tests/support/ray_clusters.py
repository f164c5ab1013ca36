"""A Ray cluster of two nodes on this machine, and what jobs on it leave on disk."""

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from spalm.files import TEMPORARY
from spalm.memory import Memory
from support import ray_workers


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Starts two nodes with a core each; jobs on them import what this process can import."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "setup_worker_path": ray_workers.__file__}
    quiet = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with ray_workers.forked_workers():
            made = Cluster(initialize_head=True, head_node_args={**node, **quiet})
            made.add_node(**node)
            made.wait_for_nodes()
            yield made
            made.shutdown()


def contents(memory: Memory) -> dict:
    """Every byte of the shards and sorted contexts, and every row of the catalogue but for the time of day.

    A worker that was told to stop may leave an unfinished file, which the next change of the memory removes.
    """
    folders = memory.shards.folder, memory.exact.folder
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != TEMPORARY]
    files = {str(path.relative_to(memory.directory)): path.read_bytes() for path in paths}
    with closing(sqlite3.connect(memory.catalogue.path)) as catalogue:
        tables = ("batches", "documents", "shards", "extents")
        rows = {name: catalogue.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
        return {**files, **rows, "versions": catalogue.execute("SELECT version, what FROM versions").fetchall()}


def table_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
