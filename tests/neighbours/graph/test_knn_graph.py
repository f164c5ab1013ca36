"""The graph of nearest neighbours against brute force: metrics, types, queries, ties, resuming."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import spalm
from spalm import InputError, knn_graph, load_knn_graph
from spalm.neighbours.graph import copies, search
from support.arrays import clustered
from support.commands import PATIENCE, begun, refused
from support.commands import spalm as command
from support.vector_files import bfloat16_of, distance_matrix, nearest, write_vectors

EXECUTION = spalm.Execution(spalm.Hardware("cpu", 2), ram=2 << 30)
METRICS = ["l2", "ip", "cosine"]


@pytest.fixture
def joined(monkeypatch):
    """Has the join search sets of any size."""
    monkeypatch.setattr(search, "FEW_VECTORS", 0)
    monkeypatch.setattr(search, "FEW_QUERIES", 0)


def make(vectors, k=5, **more):
    return knn_graph(vectors, k, execution=EXECUTION, **more)


def uneven(count, width, seed):
    """Vectors that vary most in their first dimensions."""
    return clustered(count, width, seed) * np.geomspace(3, 0.3, width, dtype=np.float32)


def check(graph, vectors, queries=None, *, metric="l2", least=1.0):
    """Compares a graph with brute force; `least` is the least recall."""
    own, k = queries is None, graph.indices.shape[1]
    matrix = distance_matrix(vectors if own else queries, vectors, metric)
    best = nearest(matrix, k, own=own)
    there = graph.indices >= 0
    assert graph.indices.dtype == np.int64
    assert graph.distances.dtype == np.float32
    assert (there.sum(1) == np.isfinite(best).sum(1)).all()
    assert np.isinf(graph.distances[~there]).all()
    for row, found in enumerate(graph.indices.tolist()):
        held = [index for index in found if index >= 0]
        assert len(set(held)) == len(held)
        assert not own or row not in held
    scale = np.abs(matrix).max() + (metric == "cosine")
    stated = np.take_along_axis(matrix, graph.indices.clip(0), 1)
    np.testing.assert_allclose(graph.distances[there], stated[there], rtol=1e-4, atol=1e-5 * scale)
    assert (np.diff(np.where(there, graph.distances, 1e30), axis=1) >= 0).all()
    furthest = np.where(np.isfinite(best), best, -np.inf).max(1, keepdims=True)
    recall = (stated[there] <= (furthest + 1e-6 * scale + 0 * stated)[there]).mean() if there.any() else 1.0
    assert recall >= least
    return recall


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.float64])
def test_a_small_set_is_searched_exactly(metric, own, dtype):
    vectors, queries = clustered(211, 13, 0).astype(dtype), clustered(53, 13, 1).astype(dtype)
    if metric == "cosine":
        vectors, queries = (each[each.any(1)] for each in (vectors, queries))
    graph = make(vectors, metric=metric, queries=None if own else queries)
    assert (graph.recall, graph.judged) == (1, len(vectors) if own else len(queries))
    assert (graph.own, graph.vectors, graph.metric) == (own, len(vectors), metric)
    check(graph, vectors, None if own else queries, metric=metric)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("dtype", "width"), [(np.float32, 13), (np.float16, 13), (np.int8, 13), (np.float32, 96)])
def test_the_join_finds_what_it_says(metric, own, dtype, width):
    vectors, queries = uneven(2003, width, 0).astype(dtype), uneven(907, width, 1).astype(dtype)
    if metric == "cosine":
        vectors, queries = (each[each.any(1)] for each in (vectors, queries))
    graph = make(vectors, metric=metric, queries=None if own else queries, recall=0.9)
    found = check(graph, vectors, None if own else queries, metric=metric, least=0.89)
    assert found == pytest.approx(graph.recall, abs=0.02)
    assert graph.judged == min(1024, -(-len(graph.indices) // 3))


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["bfloat16", "uint8", "float64"])
def test_the_join_of_other_types(own, kind):
    vectors, queries = uneven(2003, 13, 0), uneven(907, 13, 1)
    if kind == "bfloat16":
        given = [bfloat16_of(each) for each in (vectors, queries)]
        vectors, queries = ((each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in given)
    else:
        given = vectors, queries = [(each - vectors.min()).astype(kind) for each in (vectors, queries - queries.min())]
    graph = make(given[0], queries=None if own else given[1], recall=0.9)
    found = check(graph, vectors, None if own else queries, least=0.89)
    assert found == pytest.approx(graph.recall, abs=0.02)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("metric", METRICS)
def test_vectors_on_one_line_and_dimensions_that_never_change(joins, metric, request):
    """Every vector has the same number in all dimensions; then every vector differs in one dimension only."""
    if joins:
        request.getfixturevalue("joined")
    lengths = np.random.default_rng(0).permutation(np.arange(1, 1201)).astype(np.float32)
    constant = np.tile(lengths[:, None], (1, 6))
    check(make(constant, metric=metric, recall=0.99), constant, metric=metric, least=0.98)
    constant[:, 1:] = 7
    check(make(constant, metric=metric, recall=0.99), constant, metric=metric, least=0.98)


@pytest.mark.usefixtures("joined")
def test_the_recall_on_a_sample_is_that_of_all_rows():
    vectors = clustered(6000, 24, 0, centres=6000)
    graph = make(vectors, k=15, recall=0.8)
    found = check(graph, vectors, least=0.79)
    assert graph.judged == 1024
    assert found == pytest.approx(graph.recall, abs=0.02)
    assert found < 0.97, "it looks much further than it must"


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("metric", METRICS)
def test_a_hundred_neighbours(joins, metric, request):
    if joins:
        request.getfixturevalue("joined")
    vectors = clustered(1009, 11, 0)
    check(make(vectors, k=100, metric=metric, recall=0.95), vectors, metric=metric, least=0.94)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("count", [1, 2, 5, 90])
def test_fewer_vectors_than_neighbours(joins, metric, count, request):
    if joins:
        request.getfixturevalue("joined")
    vectors = clustered(count, 11, 0)
    check(make(vectors, k=100, metric=metric), vectors, metric=metric)
    check(make(vectors, k=100, metric=metric, queries=vectors[:1]), vectors, vectors[:1], metric=metric)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("copies", [2, 3, 40, 900])
def test_duplicates(joins, metric, copies, request):
    if joins:
        request.getfixturevalue("joined")
    vectors = np.repeat(clustered(1800 // copies, 7, 0), copies, axis=0)
    graph = make(vectors, metric=metric, recall=1.0)
    check(graph, vectors, metric=metric, least=0.999)
    if metric == "l2":
        assert (graph.distances[:, : min(copies - 1, 5)] == 0).all()


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("own", [True, False])
def test_vectors_with_many_copies_are_searched_once(monkeypatch, tmp_path, metric, own):
    monkeypatch.setattr(copies, "MOST_COPIES", 4)
    random = np.random.default_rng(3)
    vectors = clustered(900, 9, 0)
    vectors = vectors[np.concatenate([np.arange(900), np.full(200, 7), random.integers(0, 900, 400)])]
    vectors = vectors[random.permutation(1500)]
    queries = None if own else clustered(300, 9, 1)
    graph = make(vectors, metric=metric, queries=queries, recall=0.99, out=tmp_path / "graph")
    assert json.loads((tmp_path / "graph" / "manifest.json").read_text())["facts"]["keys"] == 900
    check(graph, vectors, queries, metric=metric, least=0.98)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("number", [0.0, 3.5])
def test_vectors_that_are_all_equal(joins, metric, number, request):
    if joins:
        request.getfixturevalue("joined")
    vectors = np.full((1200, 6), number, np.float32)
    if metric == "cosine" and not number:
        with pytest.raises(InputError, match="vectors: row 0 is zero and has no direction"):
            make(vectors, metric=metric)
        return
    check(make(vectors, metric=metric), vectors, metric=metric)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("factor", [1e-38, 1e-20, 1e15, 1e30])
@pytest.mark.parametrize("metric", METRICS)
def test_lengths_of_any_size(joins, metric, factor, request):
    if joins:
        request.getfixturevalue("joined")
    vectors = clustered(900, 40, 0) * np.geomspace(3, 0.1, 40, dtype=np.float32)
    graph, plain = (make(each, metric=metric) for each in (vectors * np.float32(factor), vectors))
    if factor > 1e-30:  # else digits are lost
        # The same neighbours but for a few: which partitions are visited depends on rounding.
        assert (graph.indices[:, 0] == plain.indices[:, 0]).mean() > 0.99
        if metric != "ip":
            expected = plain.distances * (factor if metric == "l2" else 1)
            assert np.isclose(graph.distances, expected, rtol=1e-3, atol=1e-6).mean() > 0.98
    else:
        assert (graph.indices[:, 0] == plain.indices[:, 0]).mean() > 0.9


@pytest.mark.parametrize("joins", [True, False])
def test_far_from_the_origin_small_distances_still_count(joins, request):
    if joins:
        request.getfixturevalue("joined")
    vectors = clustered(900, 8, 1) * 0.2 + 300
    check(make(vectors, recall=0.99), vectors, least=0.98)


@pytest.mark.usefixtures("joined")
def test_a_few_long_vectors_do_not_blur_the_others():
    vectors = clustered(1500, 40, 1)
    vectors[::500] *= 1e4
    check(make(vectors, recall=0.95), vectors, least=0.94)


@pytest.mark.usefixtures("joined")
def test_queries_of_another_type():
    vectors, queries = clustered(700, 9, 0).astype(np.int8), clustered(300, 9, 1)
    check(make(vectors, queries=queries, recall=0.99), vectors, queries, least=0.98)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "knn_graph: k = 0"),
        ({"k": 101}, "knn_graph: k = 101"),
        ({"recall": 0}, "knn_graph: recall = 0"),
        ({"recall": 1.5}, "knn_graph: recall = 1.5"),
        ({"recal": 0.9}, "unknown key 'recal'"),
        ({"metric": "l1"}, "knn_graph: metric = 'l1'"),
        ({"ram": "much"}, "ram = much: not a size"),
        ({"ram": 1000}, "is too little"),
        ({"queries": np.zeros((3, 5), np.float32)}, "queries: width 5, and the vectors have 4"),
        ({"queries": np.zeros((0, 4), np.float32)}, "queries: there are no vectors"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(InputError, match=message) as found:
        knn_graph(np.zeros((3, 4), np.float32), **options)
    assert "\n" not in str(found.value)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("own", [True, False])
def test_a_folder_holds_the_same_graph(tmp_path, metric, own):
    vectors, queries = clustered(1500, 9, 0), None if own else clustered(400, 9, 1)
    graph = make(vectors, metric=metric, queries=queries)
    stored = make(vectors, metric=metric, queries=queries, out=tmp_path / "graph")
    opened = load_knn_graph(tmp_path / "graph")
    for other in (stored, opened):
        np.testing.assert_array_equal(other.indices, graph.indices)
        np.testing.assert_array_equal(other.distances, graph.distances)
        assert isinstance(other.indices, np.memmap)
        for name in ("recall", "judged", "metric", "vectors", "own"):
            assert getattr(other, name) == getattr(graph, name)
    names = {path.name for path in (tmp_path / "graph").iterdir()}
    assert names == {"manifest.json", "SHA256SUMS", "indices", "distances"}


def test_a_finished_folder_is_opened_and_another_graph_is_made_anew(tmp_path, capsys):
    vectors = clustered(300, 9, 0)
    make(vectors, out=tmp_path / "graph")
    path = write_vectors(tmp_path / "a.fbin", vectors)
    make(path, out=tmp_path / "graph")
    assert "finished before, unchanged" in capsys.readouterr().err
    vectors[7] += 1
    graph = make(vectors, out=tmp_path / "graph")
    assert (tmp_path / "graph.previous").is_dir()
    check(graph, vectors)
    (tmp_path / "graph" / "indices").write_bytes(b"")
    with pytest.raises(InputError):
        load_knn_graph(tmp_path / "graph")
    with pytest.raises(InputError):
        load_knn_graph(tmp_path / "nothing")


@pytest.mark.usefixtures("joined")
def test_the_ram_that_is_used_changes_no_byte(tmp_path):
    path = write_vectors(tmp_path / "a.npy", clustered(3000, 40, 0))
    graphs = [knn_graph(path, 5, ram=ram, execution=EXECUTION) for ram in ("1G", 8 << 30)]
    np.testing.assert_array_equal(graphs[0].indices, graphs[1].indices)
    np.testing.assert_array_equal(graphs[0].distances, graphs[1].distances)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_a_run_that_dies_ends_with_the_same_bytes(tmp_path, monkeypatch, metric):
    """It dies at every step that reports progress, and is called again and again."""
    from spalm.console import Bar

    class Killed(BaseException):
        pass

    vectors = clustered(4000, 12, 0)
    make(vectors, metric=metric, out=tmp_path / "whole")
    left = {"advances": 0, "allowed": 0}
    advance = Bar.advance

    def dying(self, amount=1):
        advance(self, amount)
        left["advances"] += 1
        if left["advances"] > left["allowed"]:
            left["advances"], left["allowed"] = 0, left["allowed"] + 1
            raise Killed

    monkeypatch.setattr(Bar, "advance", dying)
    deaths = 0
    for _ in range(200):
        try:
            make(vectors, metric=metric, out=tmp_path / "killed")
            break
        except Killed:
            deaths += 1
    assert deaths > 3
    for name in ("indices", "distances", "manifest.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "killed" / "work").exists()


def test_the_command(tmp_path):
    vectors, queries = clustered(500, 9, 0), clustered(40, 9, 1)
    files = [write_vectors(tmp_path / name, each) for name, each in (("v.npy", vectors), ("q.fvecs", queries))]
    out = tmp_path / "graph"
    found = command(
        "knn", files[0], "--queries", files[1], "--k", 7, "--metric", "cosine", "--out", out, "--threads", 1
    )
    assert found.returncode == 0, found.stderr
    assert "about" in found.stderr
    said = json.loads(found.stdout)
    assert (said["rows"], said["k"], said["recall"], said["metric"]) == (40, 7, 1.0, "cosine")
    check(load_knn_graph(out), vectors, queries, metric="cosine")
    assert command("verify", out).returncode == 0
    (tmp_path / "v.npy").write_bytes((tmp_path / "v.npy").read_bytes()[:-1])
    assert "its header stands for" in refused("knn", files[0], "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert "No such file" in refused("knn", tmp_path / "missing.npy", "--out", tmp_path / "other")


@pytest.mark.slow
def test_killed_at_random_points_the_command_ends_with_the_same_bytes(tmp_path):
    path = write_vectors(tmp_path / "v.npy", clustered(60_000, 32, 0))

    def run(out):
        return begun("knn", path, "--out", tmp_path / out, "--threads", 1, "--ram", "1G")

    began = time.monotonic()
    assert run("whole").wait() == 0
    length = time.monotonic() - began
    chance = np.random.default_rng(5)
    for attempt in range(40):
        process, limit = run("killed"), chance.uniform(0.2, 1.0) * length if attempt < 6 else PATIENCE
        while process.poll() is None and limit > 0:
            time.sleep(0.02)
            limit -= 0.02
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            continue
        assert process.returncode == 0, process.errors()
        break
    for name in ("indices", "distances", "manifest.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    shutil.rmtree(tmp_path / "whole")


@pytest.mark.slow
def test_no_more_ram_is_used_than_was_asked_for(tmp_path):
    """The files that are mapped, the given one and those of the join, are 400 MB; with more RAM, more of them stays."""
    vectors = np.random.default_rng(0).standard_normal((150_000, 256), np.float32)
    path = write_vectors(tmp_path / "v.npy", vectors * np.geomspace(3, 0.03, 256, dtype=np.float32))

    def peak(ram):
        code = (
            "import sys; from spalm.cli import entry; assert not entry.run(sys.argv[2:]);"
            "open(sys.argv[1], 'w').write(open('/proc/self/status').read())"
        )
        arguments = ["knn", path, "--out", tmp_path / ram, "--ram", ram, "--threads", "1", "--recall", "0.8"]
        status = tmp_path / f"{ram}.status"
        subprocess.run(
            [sys.executable, "-c", code, *map(str, [status, *arguments])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            check=True,
        )
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) << 10

    assert peak("768M") < 768 << 20 < peak("8G")
