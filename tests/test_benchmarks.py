"""What the benchmarks claim to count."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

import bench_training as training
from spalm.compute import using_threads
from spalm.lm import count_flops


@pytest.mark.slow
def test_flops_are_those_that_torch_counts():
    """Torch's counter does not see inside the output layer's loss, nor products that are added in place."""
    lanes = 2
    with using_threads(1):  # the counter sees only what its own thread does
        subject = training.Training(lanes)
        subject.step()  # fills the memory
        with FlopCounterMode(display=False) as counter:
            subject.step()
    network = training.NETWORK
    output_layer = 3 * 2 * network.width * training.VOCABULARY
    added_in_place = network.layers * 2 * (training.SEGMENT + training.MEMORY) * network.heads * network.head_width
    seen = counter.get_total_flops() / subject.tokens
    claimed = count_flops(network, training.VOCABULARY, segment=training.SEGMENT, memory=training.MEMORY, lanes=lanes)
    assert claimed.step == seen + output_layer + added_in_place


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
