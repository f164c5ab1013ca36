"""The join against exact search: what it may miss is a matter of reach, what it must not find never is found."""

import numpy as np
import pytest

from spalm.neighbours import MISSING, Exclusion, serial_map
from spalm.neighbours.join.join import Join, JoinPlan, JoinQueries, JoinTask, Visits
from spalm.neighbours.join.layout import PartitionedVectors, partition_on_disk
from spalm.neighbours.join.tuning import RecallSample, tune_join
from spalm.neighbours.kernels import distances_to_rows
from spalm.neighbours.parallel import Workers
from spalm.neighbours.partitions import NEAR, Partitions, learn_space, partition_points
from spalm.neighbours.topk import TopK
from support.arrays import Array, brute_force, clustered

COUNT = 3
EVERYWHERE = JoinPlan(COUNT, 16, NEAR, 1e9)


def ordered(keys: Array, folder, partitions: int = 12, width: int | None = None, block: int = 100, like=None):
    sample = keys.keys(0, len(keys)).astype(np.float32)
    if like is None:
        space = learn_space(sample, width)
        like = partition_points(space.project(sample).numpy(), space, partitions, seed=1, parallel=serial_map)
    return partition_on_disk(keys, like, folder, block=block, workers=Workers())


def task(keys: PartitionedVectors, count: int, exclusion: Exclusion = Exclusion(), first_id: int = 0) -> JoinTask:  # noqa: B008
    """The neighbours of `count` of the keys themselves."""
    return JoinTask(keys, JoinQueries(keys, first_id, count), COUNT, exclusion)


def distances_of(join: Join, keys: Array):
    positions, found = join.block(0, len(join.queries.vectors))
    order = np.argsort(positions)
    ids = found.ids[order]
    rows = np.array([[keys._ids.tolist().index(id) if id != MISSING else -1 for id in row] for row in ids.tolist()])
    assert all(len(set(row) - {-1}) == sum(id != -1 for id in row) for row in rows.tolist()), "one found twice"
    return positions[order], ids, found.distances[order]


@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize("exclusion", [Exclusion(), Exclusion(window=4), Exclusion(document=True)])
def test_looking_everywhere_is_exact(tmp_path, exclusion, width):
    keys = Array(clustered(601, 11, 0))
    own = ordered(keys, tmp_path, width=width)
    join = Join(task(own, 601, exclusion), JoinPlan(COUNT, 64, NEAR, 1e9))
    positions, ids, distances = distances_of(join, keys)
    np.testing.assert_array_equal(positions, np.arange(601))
    expected = brute_force(keys, keys, COUNT, exclusion)
    if width is None:
        np.testing.assert_allclose(distances, expected, rtol=1e-4, atol=1e-4)
    else:
        assert (distances <= expected + 1e-4).mean() > 0.98
    documents = keys._documents
    for position, row in enumerate(ids):
        assert position not in row
        assert not exclusion.window or all(abs(row - position) > exclusion.window)
        assert not exclusion.document or all(documents[row] != documents[position])


def test_a_partition_that_is_packed_in_parts_is_searched_whole(tmp_path):
    keys = Array(clustered(701, 2053, 0))
    own = ordered(keys, tmp_path, partitions=1, width=2053)
    join = Join(task(own, 701), EVERYWHERE)
    _, _, distances = distances_of(join, keys)
    np.testing.assert_allclose(distances, brute_force(keys, keys, COUNT, Exclusion()), rtol=1e-3, atol=1e-3)


def test_partitions_without_keys_are_visited(tmp_path):
    own = ordered(Array(clustered(601, 11, 0)), tmp_path)
    own.starts[1:] = own.starts[1]
    join = Join(task(own, 1), EVERYWHERE)
    empty = np.full(1, 3, np.int32)
    best = join.new_topk(np.zeros(1, np.int64))
    join.visit(own.scan(np.zeros(1, np.int64)), best, Visits(np.zeros(1, np.int32), empty, np.zeros(1, np.float32)))
    assert (best.rows == MISSING).all()


@pytest.mark.parametrize("copies", [2, 30, 300])
def test_a_key_never_finds_itself_among_its_duplicates(tmp_path, copies):
    """All copies are equally near, the query itself among them: only its id tells it apart."""
    keys = Array(np.repeat(clustered(600 // copies, 7, 0), copies, axis=0))
    own = ordered(keys, tmp_path, partitions=5)
    _, ids, distances = distances_of(Join(task(own, 600), EVERYWHERE), keys)
    assert (ids != np.arange(600)[:, None]).all()
    assert (ids != MISSING).all()
    assert (distances[:, : min(copies - 1, COUNT)] == 0).all()


def test_queries_that_are_not_entries_find_everything(tmp_path):
    keys, queries = Array(clustered(500, 11, 0)), Array(clustered(90, 11, 5))
    own = ordered(keys, tmp_path / "keys")
    other = ordered(queries, tmp_path / "queries", like=own.partitions)
    join = Join(JoinTask(own, JoinQueries(other, None, 90), COUNT, Exclusion(document=True, window=9)), EVERYWHERE)
    positions, _, distances = distances_of(join, keys)
    np.testing.assert_array_equal(positions, np.arange(90))
    np.testing.assert_allclose(distances, brute_force(keys, queries, COUNT, None), rtol=1e-4, atol=1e-4)


def test_only_the_positions_that_are_asked_for_are_answered(tmp_path):
    keys = Array(clustered(300, 7, 0), ids=np.arange(300) + 1000)
    own = ordered(keys, tmp_path)
    positions, _, distances = distances_of(Join(task(own, 50, first_id=1100), EVERYWHERE), keys)
    np.testing.assert_array_equal(positions, np.arange(50))
    expected = brute_force(keys, keys, COUNT, Exclusion())[100:150]
    np.testing.assert_allclose(distances, expected, rtol=1e-4, atol=1e-4)


def test_too_few_entries_leave_the_rest_empty(tmp_path):
    keys = Array(clustered(3, 7, 0))
    own = ordered(keys, tmp_path, partitions=2)
    _, ids, distances = distances_of(Join(task(own, 3), EVERYWHERE), keys)
    assert (ids[:, 2] == MISSING).all()
    assert np.isinf(distances[:, 2]).all()
    assert (ids[:, :2] != MISSING).all()


def test_the_join_of_a_part_is_a_part_of_the_join(tmp_path):
    keys = Array(clustered(601, 11, 0))
    own = ordered(keys, tmp_path)
    join = Join(task(own, 601), JoinPlan(COUNT, COUNT, NEAR, 0.3))
    positions, found = join.block(0, 601)
    whole = dict(zip(positions.tolist(), found.distances.tolist()))
    parts = {}
    for first, last in ((0, 100), (100, 101), (101, 601)):
        positions, found = join.block(first, last)
        parts.update(zip(positions.tolist(), found.distances.tolist()))
    assert parts.keys() == whole.keys()
    for position, distances in whole.items():
        np.testing.assert_allclose(parts[position], distances, rtol=1e-5)


def test_far_from_the_origin_small_distances_still_count(tmp_path):
    keys = Array(clustered(400, 8, 1).astype(np.float64) * 0.2 + 30)
    own = ordered(keys, tmp_path)
    _, _, distances = distances_of(Join(task(own, 400), EVERYWHERE), keys)
    np.testing.assert_allclose(distances, brute_force(keys, keys, COUNT, Exclusion()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.8, 0.95, 1.0])
def test_it_tunes_itself_to_the_recall_that_is_asked_for(tmp_path, target):
    keys = Array(clustered(6000, 16, 0, centres=6000))  # no clusters: the hardest case
    own = ordered(keys, tmp_path, partitions=60, block=1000)
    tuned = tune_join(task(own, 6000), RecallSample.of(task(own, 6000), 1, serial_map), target)
    plan, recall = tuned.plan, tuned.recall
    assert recall >= target
    other = RecallSample.of(task(own, 6000), 2, serial_map)
    found = Join(task(own, 6000), plan).neighbours_of(other.rows)
    assert other.recall(found.distances) == pytest.approx(recall, abs=0.03)
    if target == 0.8:
        assert recall < 0.95, "it looks much further than it must"


@pytest.mark.parametrize("count", [1, 2, 7, 900])
def test_it_is_judged_by_queries_on_which_it_was_not_tuned(tmp_path, count):
    keys = Array(clustered(900, 7, 0))
    own = ordered(keys, tmp_path)
    sample = RecallSample.of(task(own, count), 1, serial_map)
    tuning, judging = sample.split()
    assert len(judging.rows) == -(-count // 3)
    if count > 1:
        assert not set(tuning.rows) & set(judging.rows)
    assert {*tuning.rows, *judging.rows} == {*sample.rows}
    places = np.searchsorted(sample.rows, judging.rows)
    np.testing.assert_array_equal(judging.true, sample.true[places])
    np.testing.assert_array_equal(judging.distances, sample.distances[places])


def test_recall_counts_what_is_as_near_as_the_true_ones(tmp_path):
    keys = Array(np.repeat(clustered(40, 7, 0), 10, axis=0))
    own = ordered(keys, tmp_path, partitions=4)
    sample = RecallSample.of(task(own, 400), 1, serial_map)
    found = Join(task(own, 400), EVERYWHERE).neighbours_of(sample.rows)
    assert sample.recall(found.distances) == 1
    found.distances[::2] = np.inf
    assert sample.recall(found.distances) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("width", [None, 5])
def test_putting_in_order_is_a_permutation_and_resumes(tmp_path, width):
    keys = Array(clustered(1003, 11, 0))
    whole = ordered(keys, tmp_path / "whole", width=width)
    np.testing.assert_array_equal(np.sort(whole.label_of), np.arange(1003))
    np.testing.assert_array_equal(whole.whole, keys.take(np.asarray(whole.label_of)))
    np.testing.assert_array_equal(whole.partition_of(np.arange(1003)), np.repeat(np.arange(12), np.diff(whole.starts)))
    near = whole.relative(slice(0, 1003))
    np.testing.assert_allclose(whole.half_norms, near.square().sum(1) / 2, rtol=1e-5)
    projected = whole.partitions.space.project(whole.whole)
    np.testing.assert_allclose(whole.scan(np.arange(1003)), projected, rtol=0, atol=float(near.abs().max()) / 256)

    class Killed(BaseException):
        pass

    def dying(_, left=[0]):  # noqa: B006
        left[0] += 1
        if left[0] % 3 == 0:
            raise Killed

    for _ in range(100):
        try:
            again = partition_on_disk(
                keys, whole.partitions, tmp_path / "killed", block=100, workers=Workers(), progress=dying
            )
            break
        except Killed:
            continue
    for name in ("keys", "labels", "documents", "half_norms", "starts", "scan"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(again) == 1003


def test_distances_of_every_half_precision_number():
    """All 65,536 patterns of bits but those of infinities and what is no number; signs and subnormals included."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    rows = np.arange(len(halves))[:, None]
    found = np.empty(rows.shape, np.float32)
    vectors = np.full((len(halves), 1), 0.5, np.float32)
    distances_to_rows(halves.view(np.uint16)[:, None], rows, vectors, found)
    np.testing.assert_allclose(found[:, 0], (halves.astype(np.float64) - 0.5) ** 2, rtol=1e-6)
    distances_to_rows(halves.view(np.uint16)[:, None], np.full_like(rows, MISSING), vectors, found)
    assert np.isinf(found).all()


def test_partitions_survive_being_saved(tmp_path):
    keys = clustered(500, 11, 0)
    space = learn_space(keys, 4)
    made = partition_points(space.project(keys).numpy(), space, 9, seed=1, parallel=serial_map)
    made.save(tmp_path / "p")
    found = Partitions.load(tmp_path / "p")
    vectors = space.project(keys).numpy()
    np.testing.assert_array_equal(found.assign(vectors), made.assign(vectors))
    assert all(number not in row for number, row in enumerate(found.near.tolist()))


@pytest.mark.parametrize("exclusion", [Exclusion(), Exclusion(window=3)])
def test_the_true_neighbours_are_exact_with_fewer_dimensions_too(tmp_path, exclusion):
    keys = Array(clustered(900, 24, 0) * np.linspace(2, 0.1, 24, dtype=np.float32))
    own = ordered(keys, tmp_path, width=6, block=500)
    sample = RecallSample.of(task(own, 900, exclusion), 1, serial_map)
    expected = brute_force(keys, keys, COUNT, exclusion)[np.asarray(own.label_of)[sample.rows]]
    np.testing.assert_allclose(sample.distances, expected, rtol=1e-4, atol=1e-5)
    direct = ((own.take(sample.true).astype(np.float32) - own.take(sample.rows).astype(np.float32)[:, None]) ** 2).sum(
        2
    )
    np.testing.assert_allclose(sample.distances, direct, rtol=1e-4, atol=1e-5)


def test_the_true_neighbours_of_an_outlier_are_exact_without_a_long_list(tmp_path, monkeypatch):
    """From far away all keys are about equally far: too many candidates for a list in order."""
    far = clustered(4, 8, 1) * 200
    keys = Array(np.concatenate([clustered(600, 8, 0), far]))
    own = ordered(keys, tmp_path)
    longest = []
    make = TopK.__init__
    monkeypatch.setattr(TopK, "__init__", lambda self, *given: (longest.append(given[1]), make(self, *given))[1])
    sample = RecallSample.of(task(own, 604), 1, serial_map)
    expected = brute_force(keys, keys, COUNT, Exclusion())[np.asarray(own.label_of)[sample.rows]]
    np.testing.assert_allclose(sample.distances, expected, rtol=1e-4, atol=1e-2)
    assert np.isin(np.arange(600, 604), np.asarray(own.label_of)[sample.rows]).all(), "the outliers are in the sample"
    assert 4 * COUNT < max(longest) <= 16 * COUNT
