"""What the benchmarks claim to count."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

import bench_training as training
from spalm.compute import using_threads
from spalm.lm import count_flops


@pytest.mark.slow
def test_flops_are_those_that_torch_counts():
    """Torch's counter does not see inside the output layer's loss."""
    lanes = 2
    with using_threads(1):  # the counter sees only what its own thread does
        subject = training.Training(lanes)
        subject.step()  # fills the memory
        with FlopCounterMode(display=False) as counter:
            subject.step()
    network = training.NETWORK
    output_layer = 3 * 2 * network.width * training.VOCABULARY
    seen = counter.get_total_flops() / subject.tokens
    claimed = count_flops(network, training.VOCABULARY, segment=training.SEGMENT, memory=training.MEMORY, lanes=lanes)
    assert claimed.step == seen + output_layer


def test_repeated_keys_are_the_same_however_they_are_read(tmp_path):
    import numpy as np

    import bench_neighbours as neighbours
    from spalm.memory import remember, source_of_text
    from support.stub_memory import StubEncoder, new_memory, random_texts, stream

    encoder = StubEncoder()
    memory = new_memory(tmp_path / "memory", encoder)
    text = stream(random_texts(np.random.default_rng(0), 20))
    remember(memory, encoder, text, source=source_of_text(text))
    repeated = neighbours.RepeatedKeys(memory, 3 * len(text))
    whole = repeated.keys(0, len(repeated))
    pieces = [repeated.keys(start, min(start + 37, len(repeated))) for start in range(0, len(repeated), 37)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert not np.array_equal(whole[: len(text)], whole[len(text) : 2 * len(text)])


def test_peers_are_judged_by_distance_and_without_themselves():
    import numpy as np

    import peers

    random = np.random.default_rng(0)
    keys = np.repeat(random.standard_normal((60, 5)).astype(np.float32), 2, axis=0)
    truth = peers.Truth.of(keys, 3, 40, 1)
    distances = ((keys[truth.rows][:, None] - keys[None]) ** 2).sum(2)
    order = np.argsort(distances, axis=1)[:, :4]
    assert truth.recall(keys, peers.without_itself(order, truth.rows)) == 1.0
    assert truth.recall(keys, np.full((40, 3), -1)) == 0.0


def test_the_gain_that_is_kept_is_counted_in_perplexity_and_in_nats():
    import math

    import bench_attach as attach

    curve = [
        {"wanted": 0.0, "searched": 0.0, "perplexity": 16.0},
        {"wanted": 0.3, "searched": 0.28, "perplexity": 8.0},
        {"wanted": 1.0, "searched": 1.0, "perplexity": 6.0},
    ]
    kept = attach.gain_kept(curve, 16.0, 0.3)
    assert kept == {"searched": 0.28, "perplexity": 0.8, "nats": pytest.approx(math.log(2) / math.log(16 / 6))}


def test_a_percentile_is_never_more_than_what_was_measured():
    import bench_serving as serving

    assert serving.percentile_95([3.0]) == 3.0
    assert 2.0 < serving.percentile_95([1.0, 2.0, 3.0]) < 3.0
    assert serving.percentile_95([float(value) for value in range(101)]) == 95.0


def test_neighbours_of_keys_are_those_of_other_documents():
    import torch

    import bench_keys as keys

    generator = torch.Generator().manual_seed(0)
    states, documents = torch.randn(23, 5, generator=generator), torch.arange(23) // 4
    asked, own = torch.randn(7, 5, generator=generator), torch.tensor([0, 1, 2, 3, 4, 5, 9])
    rows, distances = keys.nearest(asked, states, own, documents, 3)
    for number in range(7):
        every = sorted(
            (float((asked[number] - states[row]).square().sum()), row)
            for row in range(23)
            if documents[row] != own[number]
        )
        assert rows[number].tolist() == [row for _, row in every[:3]]
        assert distances[number].tolist() == pytest.approx([distance for distance, _ in every[:3]], abs=1e-4)


def test_a_projection_is_judged_by_the_weight_of_the_right_token_in_other_documents():
    import math

    import torch

    import bench_keys as keys

    generator = torch.Generator().manual_seed(1)
    asked, compared = torch.randn(5, 3, generator=generator), torch.randn(11, 3, generator=generator)
    tokens, documents = torch.arange(11) % 3, torch.arange(11) // 4
    own_tokens, own_documents = torch.tensor([0, 1, 2, 0, 9]), torch.tensor([0, 1, 2, 7, 0])
    found = keys.neighbour_loss(asked, compared, own_tokens[:, None] == tokens, own_documents[:, None] == documents)
    losses = []
    for number in range(4):  # no entry has the last one's token
        others = [row for row in range(11) if documents[row] != own_documents[number]]
        weights = {row: math.exp(-float((asked[number] - compared[row]).square().sum())) for row in others}
        right = sum(weight for row, weight in weights.items() if tokens[row] == own_tokens[number])
        losses.append(-math.log(right / sum(weights.values())))
    assert float(found) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_fitted_projection_brings_the_same_tokens_together():
    """One direction in which tokens differ is drowned by others: principal axes leave it out, a fitted one finds it."""
    import torch

    import bench_keys as keys
    from spalm.memory import Projection

    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(5, (400,), generator=generator)
    states = 9 * torch.randn(400, 7, generator=generator)
    states[:, 3] = tokens.float() + 0.05 * torch.randn(400, generator=generator)
    documents = torch.arange(400) // 20
    fitted = keys.fit_projection(states, tokens, documents, width=2, judged=documents >= 10, steps=200)

    def right(projection: Projection) -> float:
        projected = projection(states)
        rows, _ = keys.nearest(projected, projected, documents, documents, 1)
        return float((tokens[rows[:, 0]] == tokens).double().mean())

    assert right(Projection.learn(states.numpy(), 2)) < 0.4
    assert right(fitted) > 0.7


def test_an_interval_holds_the_mean_gain():
    import torch

    import bench_keys as keys

    gains, documents = torch.arange(12.0), torch.arange(12) // 3
    low, high = keys.interval(gains, documents)
    assert low < 5.5 < high
    assert keys.interval(torch.ones(12), documents) == [1.0, 1.0]


def test_what_a_join_reads_is_counted():
    import numpy as np

    import bench_plan as plan
    from spalm.neighbours.join.join import Join

    vectors = np.random.default_rng(0).standard_normal((3001, 8)).astype(np.float32)
    visit = Join.visit
    with plan.ReadCounter() as reads:
        from spalm.neighbours.graph import search

        few, search.FEW_VECTORS = search.FEW_VECTORS, 0
        try:
            graph = plan.spalm.knn_graph(vectors, 4, ram=2 << 30)
        finally:
            search.FEW_VECTORS = few
    assert Join.visit is visit
    assert graph.indices.shape == (3001, 4)
    assert 3001 <= reads.fresh <= reads.scanned
    assert reads.whole >= 4 * 3001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "candidates"),
    [
        ("faiss", "_faiss_lists"),
        ("faiss", "_faiss_reduced"),
        ("faiss", "_faiss_descent"),
        ("pynndescent", "_pynndescent"),
        ("hnswlib", "_hnswlib"),
        ("faiss", "_faiss_hnsw"),
        ("usearch", "_usearch"),
        ("scann", "_scann"),
    ],
)
def test_every_peer_of_the_graph_reaches_the_recall(library, candidates):
    import numpy as np

    import knn_peers
    import peers
    from support.arrays import clustered

    pytest.importorskip(library, reason=f"pip install {library}")
    keys = clustered(3001, 24, 0) * np.geomspace(3, 0.1, 24, dtype=np.float32)
    truth, best = peers.Truth.of(keys, 5, 211, 1), {}
    for candidate in getattr(knn_peers, candidates)(keys, 5):
        for recall, seconds, _ in peers.measure(candidate.build(), keys, truth, [0.95]):
            best[candidate.system] = max(best.get(candidate.system, 0.0), recall)
            assert seconds > 0
    assert best
    assert min(best.values()) >= 0.95


@pytest.mark.slow
def test_a_set_up_that_takes_too_long_is_stopped_and_the_next_one_is_measured(tmp_path):
    import numpy as np

    import measuring_process as measuring
    import peers
    from support.arrays import clustered

    keys = clustered(3001, 24, 0).astype(np.float32)
    np.save(tmp_path / "keys.npy", keys)
    truth = peers.Truth.of(keys, 5, 211, 1)
    process = measuring.MeasuringProcess(measuring.Subject(tmp_path / "keys.npy", 5, truth, [0.9]))
    try:
        system, name = "faiss big_batch_search", "IVF64"
        with pytest.raises(measuring.NotMeasured, match="stopped: building took more than 0 s"):
            list(process.peer(system, name, 0.0))
        ((recall, seconds, settings),) = process.peer(system, name, 100.0)
        assert recall >= 0.9
        assert 0 < seconds < 100
        assert settings.startswith("IVF64, ")
        assert process.ours(0.9)[0] >= 0.9
        with pytest.raises(measuring.NotMeasured, match="failed while beginning"):
            list(process.peer("nobody", "nothing", 100.0))
    finally:
        process.stop()


def test_a_search_is_not_timed_that_falls_short_or_would_take_too_long():
    import math

    import numpy as np

    import peers

    keys = np.random.default_rng(0).standard_normal((101, 3)).astype(np.float32)
    truth = peers.Truth.of(keys, 2, 11, 1)
    order = np.argsort(((keys[:, None] - keys[None]) ** 2).sum(2), axis=1)
    timed = []

    def search(rows, count):
        timed.append(len(rows))
        return np.column_stack([order[rows, :count], np.full((len(rows), 3 - count), -1)])

    short = list(peers.measure(peers.SetUp("a", 1.0, [2], search), keys, truth, [0.9], longest=9.0))
    assert short == [(0.5, math.inf, "a, 2")]
    slow = list(peers.measure(peers.SetUp("b", 1.0, [2, 3], search), keys, truth, [0.9], longest=0.1))
    assert [(each[0], each[1]) for each in slow] == [(1.0, math.inf)]
    assert "by 11 queries" in slow[0][2]
    assert timed == [11, 11, 11]
    twice = list(peers.measure(peers.SetUp("c", 1.0, [2, 3], search), keys, truth, [0.4, 0.5, 0.9], longest=9.0))
    assert twice[0] == twice[1]
    assert timed[3:] == [11, 101, 11, 101]
