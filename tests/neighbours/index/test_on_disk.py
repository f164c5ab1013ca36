"""The index on disk: every key in the list of its partition, whoever made it and however often it was interrupted."""

import shutil
import struct

import faiss
import numpy as np
import pytest

from spalm.compute import LOCAL
from spalm.digests import SUMS, sum_up
from spalm.errors import InputError
from spalm.memory import remember, source_of_text
from spalm.neighbours import MISSING, IndexSettings, exact_search, make_searcher, open_searcher, serial_map
from spalm.neighbours.index import ivf, on_disk
from spalm.neighbours.index.on_disk import OnDiskIndex
from support.arrays import Array
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

ENCODER = StubEncoder()
COUNT = 3001
SETTINGS = IndexSettings(kind="disk", recall=0.95, neighbours=4)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(on_disk, "_PART", 701)
    monkeypatch.setattr(ivf, "_AT_ONCE", 211)


@pytest.fixture
def keys():
    """Clusters in 96 dimensions, most of which hardly matter, with ids that have gaps."""
    random = np.random.default_rng(5)
    scale = np.where(np.arange(96) < 20, 1.0, 0.02)
    centres = random.standard_normal((40, 96)) * 3
    found = (centres[random.integers(0, 40, COUNT)] + random.standard_normal((COUNT, 96))) * scale
    return Array(found, ids=np.arange(COUNT) * 3 + 7)


def built(keys, folder, engine=LOCAL) -> OnDiskIndex:
    folder.mkdir(exist_ok=True)
    return OnDiskIndex.build(keys, 1, folder, engine=engine)


def lists_of(index: OnDiskIndex) -> dict[int, np.ndarray]:
    lists = index._index.invlists
    return {
        number: faiss.rev_swig_ptr(lists.get_ids(number), lists.list_size(number)).copy()
        for number in range(index.most_effort)
    }


def test_every_key_is_in_the_list_of_its_partition(keys, tmp_path, capfd):
    index = built(keys, tmp_path)
    assert index._partitions.space.width == 32
    assert len(list(tmp_path.glob("0000*"))) == 5
    vectors = index._partitions.space.project(keys.keys(0, COUNT)).numpy()
    own = dict(zip(keys.labels(0, COUNT).tolist(), index._partitions.assign(vectors).tolist()))
    held = [(id, number) for number, ids in lists_of(index).items() for id in ids.tolist()]
    assert sorted(held) == sorted(own.items())
    assert capfd.readouterr().out == ""


def test_with_all_effort_the_nearest_are_among_the_candidates(keys, tmp_path):
    index = built(keys, tmp_path)
    index.effort = index.most_effort
    queries = keys.take(np.arange(0, COUNT, 31)).astype(np.float32)
    proposed = index.candidates(queries, 20)
    assert proposed.shape == (len(queries), 20)
    whole = keys.keys(0, COUNT).astype(np.float32)
    distances = ((queries[:, None] - whole) ** 2).sum(2)
    true = keys.labels(0, COUNT)[np.argsort(distances, 1)[:, :5]]
    assert np.mean([np.isin(wanted, found).mean() for wanted, found in zip(true, proposed)]) > 0.99


def test_what_is_added_is_proposed_and_what_is_deleted_of_it_is_not(keys, tmp_path):
    index = built(keys, tmp_path)
    index.effort = 2
    new = np.random.default_rng(6).standard_normal((4, 96)).astype(np.float32) + 30
    assert index.add(np.array([90001, 90002, 90003, 90004]), new)
    assert {90001, 90002, 90003, 90004} <= set(index.candidates(new, 6).ravel().tolist())
    index.delete(np.array([90002, 7]))
    proposed = set(index.candidates(new, 6).ravel().tolist())
    assert proposed >= {90001, 90003, 90004}
    assert 90002 not in proposed


class Stopped(BaseException):
    pass


class Stopping:
    """An engine that is stopped after some parts."""

    def __init__(self, after: int):
        self._after = after

    def __getattr__(self, name: str):
        return getattr(LOCAL, name)

    def run_parts(self, *arguments, **options):
        for number, done in enumerate(LOCAL.run_parts(*arguments, **options), 1):
            yield done
            if number == self._after:
                raise Stopped


def test_an_interrupted_index_goes_on_to_the_same_bytes(keys, tmp_path):
    built(keys, tmp_path / "whole").save(tmp_path / "whole")
    with pytest.raises(Stopped):
        built(keys, tmp_path / "again", Stopping(2))
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again").iterdir()}
    built(keys, tmp_path / "again")
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again").iterdir()}
    assert len(made) >= 4  # two parts, partitions, the trained index
    assert made.items() <= kept.items()
    assert (tmp_path / "again" / "lists").read_bytes() == (tmp_path / "whole" / "lists").read_bytes()


@pytest.fixture
def memory(tmp_path):
    made = new_memory(tmp_path / "memory", ENCODER)
    add(made, random_texts(np.random.default_rng(3), 150))
    return made


def add(memory, texts):
    text = stream(texts)
    remember(memory, ENCODER, text, source=source_of_text(text))


def test_a_folder_can_be_moved(memory, tmp_path, capfd):
    searcher, description = make_searcher(memory, tmp_path / "index", SETTINGS)
    queries = memory.entries().keys(0, 9).astype(np.float32)
    expected = searcher.search(queries, 3)
    assert not list((tmp_path / "index").glob("work-*"))
    shutil.move(tmp_path / "index", tmp_path / "elsewhere")
    moved, again = open_searcher(memory, tmp_path / "elsewhere")
    assert again == description
    for one, other in zip(moved.search(queries, 3), expected):
        np.testing.assert_array_equal(one, other)
    assert capfd.readouterr().out == ""


def test_unfinished_work_for_another_state_of_the_memory_is_dropped(memory, tmp_path):
    with pytest.raises(Stopped):
        make_searcher(memory, tmp_path / "index", SETTINGS, engine=Stopping(1))
    (before,) = (tmp_path / "index").glob("work-*")
    add(memory, {"new": [3, 4, 5] * 20})
    searcher, _ = make_searcher(memory, tmp_path / "index", SETTINGS)
    assert not before.exists()
    new = memory.entries().keys(len(memory.entries()) - 2, len(memory.entries())).astype(np.float32)
    assert (searcher.search(new, 1)[1] < 1e-6).all()


@pytest.mark.parametrize("name", ["lists", "index", "partitions.safetensors"])
@pytest.mark.parametrize("digests", [True, False], ids=["", "by an earlier version"])
def test_a_damaged_index_is_told(memory, tmp_path, name, digests):
    """A mapped file that ends too early would end the process."""
    make_searcher(memory, tmp_path / "index", SETTINGS)
    if not digests:
        (tmp_path / "index" / SUMS).unlink()
    path = tmp_path / "index" / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"is damaged.*make the index again"):
        open_searcher(memory, tmp_path / "index")


@pytest.mark.parametrize("kind", ["disk", "faiss"])
def test_any_flipped_bit_of_an_index_is_told_before_it_is_opened(memory, tmp_path, monkeypatch, kind):
    """The library that reads it would trust it, and may end the process."""
    folder, random = tmp_path / "index", np.random.default_rng(7)
    make_searcher(memory, folder, SETTINGS.model_copy(update={"kind": kind}))
    open_searcher(memory, folder)
    monkeypatch.setattr("spalm.neighbours.index.build.load_index", None)
    for path in folder.iterdir():
        good = path.read_bytes()
        for place in {0, len(good) - 1, *random.integers(0, len(good), 20).tolist()}:
            bad = bytearray(good)
            bad[place] ^= 1 << int(random.integers(8))
            path.write_bytes(bad)
            with pytest.raises(InputError, match="damaged"):
                open_searcher(memory, folder)
        path.write_bytes(good)


def test_lists_outside_of_their_file_are_not_read(memory, tmp_path):
    """An index that somebody made to be so, its digests included."""
    folder = tmp_path / "index"
    searcher, _ = make_searcher(memory, folder, SETTINGS)
    held = searcher.index._lists_file._lists.lists.at(1)
    place = struct.pack("<QQQ", held.size, held.capacity, held.offset)
    content = (folder / "index").read_bytes()
    assert content.count(place) == 1
    (folder / "index").write_bytes(content.replace(place, struct.pack("<QQQ", held.size, held.capacity, 1 << 40)))
    sum_up(folder, ["index.json", "index", "lists", "partitions.safetensors"])
    with pytest.raises(InputError, match="damaged"):
        open_searcher(memory, folder)


def test_a_full_disk_is_told_before_it_is_full(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(InputError, match="GB free, the index needs up to"):
        make_searcher(memory, tmp_path / "index", SETTINGS)


def test_of_a_single_entry_there_is_an_index_too(tmp_path):
    memory = new_memory(tmp_path / "memory", ENCODER)
    add(memory, {"a": [3]})
    searcher, description = make_searcher(memory, tmp_path / "index", SETTINGS)
    assert description.recall is None
    assert searcher.search(memory.entries().keys(0, 1).astype(np.float32), 2)[0].tolist() == [[0, MISSING]]


def test_what_was_forgotten_does_not_crowd_out_what_is_alive(tmp_path):
    """The lists on disk keep the dead, and what was added later proposes too few: neither ends the search too early."""
    memory = new_memory(tmp_path / "memory", ENCODER)
    add(memory, {"bad": [5] * 400, "good": list(range(20, 40)) * 5})
    searcher, _ = make_searcher(memory, tmp_path / "index", SETTINGS)
    searcher.index.effort = searcher.index.most_effort
    query = memory.entries().keys(10, 11).astype(np.float32)
    memory.forget(["bad"])
    add(memory, {"new": [48, 49]})
    searcher.catch_up()
    entries = memory.entries()
    _, true = exact_search(query, entries, 3, parallel=serial_map)
    np.testing.assert_allclose(searcher.search(query, 3)[1], true, rtol=1e-3)


def test_what_the_library_cannot_write_is_one_line(memory, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("Error in virtual size_t: lists.cpp:12\ncould not resize: No space left on device")

    monkeypatch.setattr(faiss.OnDiskInvertedLists, "merge_from_multiple", fail)
    with pytest.raises(OSError, match=r"the index could not be made \(could not resize: No space left on device\)"):
        make_searcher(memory, tmp_path / "index", SETTINGS)
    monkeypatch.undo()
    make_searcher(memory, tmp_path / "index", SETTINGS)
