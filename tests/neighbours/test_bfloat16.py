"""Products in bfloat16 against plain ones, with the machine's instructions and with those of older machines."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from spalm.neighbours import MISSING
from spalm.neighbours.bfloat16 import TILE_KEYS, TILE_QUERIES, from_pairs, to_pairs
from spalm.neighbours.exclusion import NOT_AN_ENTRY
from spalm.neighbours.join.visit_kernel import visit_partitions

OLDER = {
    "AVX2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"},
    "AVX-512": {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+avx512f,+avx512vl"},
    "none": {"NUMBA_CPU_NAME": "generic"},
}


@pytest.mark.parametrize("width", [1, 2, 7, 32])
def test_pairs_are_the_vectors_rounded(width):
    vectors = torch.from_numpy(np.random.default_rng(0).standard_normal((5, width)).astype(np.float32))
    pairs = to_pairs(vectors)
    assert pairs.shape == (5, (width + 1) // 2)
    assert torch.equal(from_pairs(pairs, width), vectors.bfloat16().float())
    assert torch.equal(from_pairs(pairs[::2], width), vectors.bfloat16().float()[::2])


@pytest.mark.parametrize("width", [1, 7, 32, 131])
@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("by_document", [False, True])
def test_visits_find_the_nearest_of_the_rounded_vectors(width, window, by_document):
    random = np.random.default_rng(width)
    sizes = [3 * TILE_KEYS + 5, 0, TILE_KEYS, 1]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    centres = 2 * random.standard_normal((4, width)).astype(np.float32)
    own = np.repeat(np.arange(4), sizes)
    near = random.standard_normal((len(own), width)).astype(np.float32)
    pairs = to_pairs(torch.from_numpy(near))
    rounded = from_pairs(pairs, width)
    queries = random.standard_normal((2 * TILE_QUERIES + 3, width)).astype(np.float32)
    visitors = [np.arange(len(queries)), np.arange(5), np.arange(1, 2 * TILE_QUERIES, 2), np.array([2])]
    query = np.concatenate(visitors).astype(np.int32)
    partition = np.repeat(np.arange(4), [len(each) for each in visitors]).astype(np.int32)
    labels, documents = random.permutation(len(own)), random.integers(0, 5, len(own))
    own_ids, own_documents = random.permutation(len(own))[: len(queries)], random.integers(0, 5, len(queries))
    own_ids[:3] = own_documents[:3] = NOT_AN_ENTRY
    scores = np.full((len(queries), 6), -np.inf, np.float32)
    rows = np.full(scores.shape, MISSING)
    half_norms = (rounded.square().sum(1) / 2).numpy()
    stored = pairs, half_norms, labels, documents
    exclusion = own_ids, own_documents, window, by_document
    visit_partitions(queries, query, partition, centres, starts, *stored, *exclusion, scores, rows)
    for number in range(len(queries)):
        seen = np.isin(own, partition[query == number])
        away = torch.from_numpy(queries[number] - centres[own]).bfloat16().float() - rounded
        distances = away.square().sum(1).numpy()
        allowed = seen & (np.abs(labels - own_ids[number]) > window)
        if by_document:
            allowed &= documents != own_documents[number]
        expected = np.sort(np.where(allowed, distances, np.inf))[:6]
        np.testing.assert_allclose(-2 * scores[number], expected, rtol=1e-3, atol=1e-3)
        found = rows[number][rows[number] != MISSING]
        assert len(found) == np.isfinite(expected).sum()
        np.testing.assert_allclose(distances[found], expected[: len(found)], rtol=1e-3, atol=1e-3)
        assert allowed[found].all()


@pytest.mark.slow
@pytest.mark.parametrize("instructions", OLDER)
def test_older_machines_compute_the_same(instructions):
    code = (
        "import numpy as np\n"
        "from spalm.neighbours import bfloat16\n"
        "from support.arrays import clustered\n"
        "import spalm\n"
        "from spalm.neighbours.graph import search\n"
        "search.FEW_VECTORS = 0\n"
        "execution = spalm.Execution(spalm.Hardware('cpu', 1), ram=1 << 30)\n"
        "graph = spalm.knn_graph(clustered(3001, 24, 0, centres=3001), 7, execution=execution)\n"
        "print(bfloat16.HAS_BFLOAT16, graph.recall, np.sqrt(graph.distances).sum())"
    )

    def run(environment):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout.split()

    has, *older = run(OLDER[instructions])
    assert has == "False"
    np.testing.assert_allclose(np.array(older, float), np.array(run({})[1:], float), rtol=2e-3)
