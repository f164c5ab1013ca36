"""Live search: whatever an index proposes, what is found is alive, in order, and not oneself."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spalm.errors import InputError
from spalm.memory import remember, source_of_text
from spalm.neighbours import MISSING, Exclusion, IndexSettings, Searcher, make_searcher, open_searcher
from spalm.neighbours.index.kinds import build_index
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

ENCODER = StubEncoder()


def add(memory, texts):
    text = stream(texts)
    remember(memory, ENCODER, text, source=source_of_text(text))


@pytest.fixture
def memory(tmp_path):
    made = new_memory(tmp_path / "memory", ENCODER)
    add(made, random_texts(np.random.default_rng(3), 80))
    return made


def truth(memory, queries, count, own=None, exclusion=Exclusion()):  # noqa: B008
    """Sorted distances, the obvious way."""
    entries = memory.entries()
    ids, keys = entries.labels(0, len(entries)), entries.keys(0, len(entries)).astype(np.float64)
    documents = entries.documents(0, len(entries))
    found = np.full((len(queries), count), np.inf)
    for number, query in enumerate(queries):
        distances = ((keys - query) ** 2).sum(1)
        if own is not None:
            home = documents[ids == own[number]]
            bad = abs(ids - own[number]) <= exclusion.window
            bad |= exclusion.document & np.isin(documents, home)
            distances = distances[~bad]
        best = np.sort(distances)[:count]
        found[number, : len(best)] = best
    return found


def kinds():
    import importlib.util

    missing = importlib.util.find_spec("scann") is None
    return [
        "exact",
        "faiss",
        "disk",
        pytest.param("scann", marks=pytest.mark.skipif(missing, reason="scann is not installed")),
    ]


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_builds_saves_loads_grows_and_forgets(memory, tmp_path, kind):
    searcher, description = make_searcher(
        memory, tmp_path / "index", IndexSettings(kind=kind, recall=0.95, neighbours=4)
    )
    assert description.recall >= 0.95
    queries = memory.entries().keys(0, 30).astype(np.float32) + 0.01
    before = searcher.search(queries, 5)
    reopened, again = open_searcher(memory, tmp_path / "index")
    assert again == description
    stored = json.loads((tmp_path / "index" / "index.json").read_text())
    assert stored.keys() == {"kind", "lineage", "upto", "effort", "recall"}
    np.testing.assert_array_equal(reopened.search(queries, 5)[1], before[1])
    memory.forget(["text-3", "text-4"])
    add(memory, {"new": [7, 8, 9, 7]})
    for each in (searcher, reopened):
        ids, distances = each.search(queries, 5)
        assert (memory.entries().rows(ids) >= 0).all()
        assert (distances <= truth(memory, queries, 5)[:, -1:] * 1.01 + 1e-3).mean() > 0.9
        new = memory.entries().keys(len(memory.entries()) - 4, len(memory.entries())).astype(np.float32)
        ids, distances = each.search(new, 1)
        assert (distances[:, 0] < 1e-6).all()
        each.catch_up()
        assert (memory.entries().rows(each.search(queries, 5)[0]) >= 0).all()


class Wild:
    """An index that proposes everything it ever heard of, shuffled, twice, with holes."""

    effort = most_effort = 1
    on_disk = False

    def __init__(self, ids):
        self.ids, self.random = ids, np.random.default_rng(0)

    def add(self, ids, keys):  # noqa: ARG002
        self.ids = np.concatenate([self.ids, ids])
        return True

    def delete(self, ids): ...

    def candidates(self, queries, count):  # noqa: ARG002
        proposed = np.concatenate([self.ids, self.ids, np.full(5, MISSING)])
        return np.stack([self.random.permutation(proposed) for _ in queries])

    def save(self, folder): ...


@pytest.mark.parametrize("exclusion", [Exclusion(), Exclusion(window=2), Exclusion(document=True)])
def test_unsorted_repeated_and_dead_proposals_do_no_harm(memory, exclusion):
    entries = memory.entries()
    everything = entries.labels(0, len(entries))
    searcher = Searcher(memory, Wild(everything), len(everything))
    memory.forget(["text-9"])
    entries = memory.entries()
    rows = np.arange(0, len(entries), 17)
    own, queries = entries.ids(rows), entries.take(rows).astype(np.float32)
    ids, distances = searcher.search(queries, 4, own=own, exclusion=exclusion)
    np.testing.assert_allclose(distances, truth(memory, queries, 4, own, exclusion), rtol=1e-3, atol=1e-3)
    assert (ids != own[:, None]).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_an_index_whose_nearest_are_all_dead_is_asked_for_more(tmp_path):
    memory = new_memory(tmp_path / "memory", ENCODER)
    add(memory, {"bad": [5] * 400, "good": list(range(20, 40)) * 5})
    entries = memory.entries()
    index = build_index("faiss", entries, 1, folder=tmp_path)
    index.effort = index.most_effort
    searcher = Searcher(memory, index, len(entries))
    query = entries.keys(10, 11).astype(np.float32)
    memory.forget(["bad"])
    ids, distances = searcher.search(query, 4)
    assert (ids >= 400).all()
    np.testing.assert_allclose(distances, truth(memory, query, 4), rtol=1e-3, atol=1e-3)


def test_an_index_of_other_keys_is_refused(memory, tmp_path):
    make_searcher(memory, tmp_path / "index", IndexSettings(kind="exact", recall=0.95, neighbours=4))
    other = new_memory(tmp_path / "other", StubEncoder("another"))
    with pytest.raises(InputError, match="index of other keys"):
        open_searcher(other, tmp_path / "index")
    with pytest.raises(InputError, match="holds no index"):
        open_searcher(memory, tmp_path / "nowhere")


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=9), min_size=1, max_size=4)
        ),
        st.tuples(st.just("forget"), st.integers(0, 10_000)),
        st.tuples(st.just("compact"), st.none()),
        st.tuples(st.just("catch up"), st.none()),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_any_sequence_of_changes_is_found_as_a_plain_list_would_be(tmp_path_factory, steps):
    """The memory beside a dictionary that does the same."""
    folder = tmp_path_factory.mktemp("fuzz")
    memory = new_memory(folder / "memory", ENCODER)
    searchers = [Searcher(memory, build_index("exact", memory.entries(), 0, folder=folder), 0)]
    plain: dict[int, tuple[str, np.ndarray, int]] = {}
    next_id = batch = 0
    queries = ENCODER.table[:3].astype(np.float32)
    for step, value in steps:
        if step == "add":
            batch += 1
            texts = {f"{batch}-{number}": text for number, text in enumerate(value)}
            text = stream(texts)
            if remember(memory, ENCODER, text, source=source_of_text(text)):
                keys = iter(ENCODER.of(np.asarray(text.tokens)))
                for name, tokens in texts.items():
                    for token in tokens:
                        plain[next_id] = name, next(keys), token
                        next_id += 1
            if len(searchers) == 1 and len(memory.entries()) > 5:
                entries = memory.entries()
                index = build_index("faiss", entries, 0, folder=folder)
                index.effort = index.most_effort
                searchers.append(Searcher(memory, index, int(entries.ids(np.array([len(entries) - 1]))[0]) + 1))
        elif step == "forget" and plain:
            names = sorted({name for name, _, _ in plain.values()})
            name = names[value % len(names)]
            memory.forget([name])
            plain = {id: entry for id, entry in plain.items() if entry[0] != name}
        elif step == "compact":
            memory.compact()
        elif step == "catch up":
            for searcher in searchers:
                searcher.catch_up()
        elif step == "reopen":
            memory = type(memory)(memory.directory)
            for searcher in searchers:
                searcher.memory = memory
        entries = memory.entries()
        assert entries.labels(0, len(entries)).tolist() == sorted(plain)
        assert entries.tokens(0, len(entries)).tolist() == [plain[id][2] for id in sorted(plain)]
        for searcher in searchers:
            ids, distances = searcher.search(queries, 4)
            for query, row, gaps in zip(queries, ids.tolist(), distances):
                true = sorted(float(((key.astype(np.float64) - query) ** 2).sum()) for _, key, _ in plain.values())[:4]
                assert {id for id in row if id != MISSING} <= set(plain)
                np.testing.assert_allclose(gaps[: len(true)], true, rtol=1e-2, atol=1e-2)
                assert np.isinf(gaps[len(true) :]).all()
    memory.verify()


@pytest.mark.parametrize(
    "wrong",
    [{"recall": 0}, {"recall": 2}, {"recall": float("nan")}, {"seed": 2**63}, {"seed": -1}, {"neighbours": 10**8}],
)
def test_settings_out_of_bounds_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        IndexSettings.parse(wrong, "index")


def test_every_seed_of_64_bits_makes_an_index(memory, tmp_path):
    searcher, _ = make_searcher(memory, tmp_path / "index", IndexSettings(kind="faiss", seed=2**63 - 1))
    assert searcher.index.effort >= 1
