"""A memory for a pretrained model: what it learns from, what it is measured on, and that nothing leaks."""

import math
import shutil
import sys

import numpy as np
import pytest
import torch

from spalm.attachment import Attached, AttachSettings, attach, score_files
from spalm.attachment.attach import _remember_training, _search_of_training
from spalm.attachment.dynamic import merge_nearest, nearest_in_past
from spalm.attachment.fitting.examples import ExampleSets, _pieces
from spalm.attachment.fitting.learning import mixture_log_probabilities
from spalm.attachment.fitting.measuring import advance_unsearched, perplexity
from spalm.attachment.search_policy import ALWAYS_SEARCH, PolicySettings, learn_policy, search_threshold
from spalm.compute import Execution, Hardware
from spalm.errors import InputError
from spalm.files import read_json
from spalm.memory import source_of_split
from spalm.semiparametric import PlainCombiner, Retrieved
from support.facts import write_documents

CPU = Hardware("cpu", 1)
ON_CPU = Execution(CPU)


@pytest.fixture(scope="module")
def attached(attached_folder) -> Attached:
    return Attached(attached_folder, CPU)


@pytest.fixture(scope="module")
def examples(attached) -> ExampleSets:
    base, corpus, settings = attached.base, attached.corpus, attached.settings
    remembered = _remember_training(base, corpus, attached.memory.directory, settings=settings, execution=ON_CPU)
    search = _search_of_training(corpus, remembered, settings, index=attached.directory / "index")
    return ExampleSets.collect(base, corpus, search, learned=remembered.learned, settings=settings)


@pytest.fixture
def copy(attached_folder, tmp_path) -> Attached:
    return Attached(shutil.copytree(attached_folder, tmp_path / "copy"), CPU)


@pytest.mark.slow
def test_the_memory_pays_on_documents_that_it_does_not_hold(attached):
    for figures in attached.combiner_artifact.facts["figures"].values():
        assert figures["adaptive"] < figures["knn-lm"] < figures["plain"]


def test_figures_are_those_of_the_model_itself_and_of_the_combiner_over_the_whole_vocabulary(attached, examples):
    """Document by document through transformers' own forward, and through the combiner that answers requests."""
    test, model = attached.corpus.split("test"), attached.base.model.model
    plain = []
    for begin, end in zip(test.begins, test.ends):
        tokens = torch.from_numpy(test.tokens[begin:end].astype(np.int64))
        inputs = torch.cat([torch.tensor([test.start]), tokens])[: attached.settings.context]
        with torch.no_grad():
            scores = model(inputs[None]).logits[0].log_softmax(-1)
        plain.append((int(begin), scores.gather(-1, tokens[: len(inputs), None])[:, 0]))
    for begin, scores in plain:
        torch.testing.assert_close(examples.test.log_base[begin : begin + len(scores)], scores, rtol=1e-3, atol=1e-3)
    rows = torch.arange(0, len(examples.test), 7)
    part = examples.test[rows]
    combined = attached.combiner.combine(attached.base.model, part.base.hidden, part.retrieved)
    np.testing.assert_allclose(combined.log_probabilities.exp().sum(-1), 1, atol=1e-4)
    found = combined.log_probabilities.gather(-1, part.targets[:, None])[:, 0]
    torch.testing.assert_close(found, mixture_log_probabilities(attached.mixture, part), rtol=1e-3, atol=1e-3)
    assert perplexity(examples.test.log_base) == pytest.approx(
        attached.combiner_artifact.facts["figures"]["test"]["plain"], 1e-4
    )


def test_without_neighbours_the_combiners_are_the_model(attached, examples):
    hidden = examples.test.base.hidden[:5]
    nothing = Retrieved(torch.zeros(5, 0, dtype=torch.long), torch.zeros(5, 0), torch.zeros(5, 0, dtype=torch.long))
    plain = PlainCombiner().combine(attached.base.model, hidden, nothing).log_probabilities
    for combiner in attached.combiners.values():
        torch.testing.assert_close(combiner.combine(attached.base.model, hidden, nothing).log_probabilities, plain)


def test_training_positions_do_not_see_their_own_document_and_dev_sees_no_held_out_text(attached, examples):
    entries, train = attached.memory.entries(), attached.corpus.split("train")
    first = attached.memory.first_id(source_of_split(attached.corpus, "train"))
    held = entries.live_documents
    for part in (examples.train, examples.dev, examples.test):
        ids = part.retrieved.ids[part.retrieved.present].numpy()
        assert first <= ids.min() <= ids.max() < first + len(train)
    rows = _pieces(entries.first_row(first + len(train)), attached.settings)
    own = held.index_of(entries.ids(rows))
    for part in (examples.train, examples.advanced):
        found, there = part.retrieved.ids.numpy(), part.retrieved.present.numpy()
        assert there.any()
        assert not (held.index_of(found) == own[:, None])[there].any()
    assert {*attached.corpus.split("dev").names} <= {*held.names}, "afterwards they are remembered too"


@pytest.mark.slow
def test_attaching_again_changes_nothing_and_other_settings_are_measured_without_what_came_later(copy, tmp_path):
    before = {path: path.read_bytes() for path in copy.directory.rglob("*") if path.is_file()}
    texts = copy.directory.parent / "text"
    texts.mkdir()
    write_documents(texts)
    model, corpus = str(copy.base.folder.path), read_json(copy.directory / "corpus" / "manifest.json")
    original = corpus["settings"]["source"]["path"]
    again = attach(model, [*map(type(tmp_path), original)], copy.directory, settings=copy.settings, execution=ON_CPU)
    assert {path: path.read_bytes() for path in before} == before
    other = copy.settings.model_copy(update={"search": 0.3})
    changed = attach(model, [*map(type(tmp_path), original)], copy.directory, settings=other, execution=ON_CPU)
    for split, figures in changed.combiner_artifact.facts["figures"].items():
        assert figures == pytest.approx(again.combiner_artifact.facts["figures"][split], rel=0.02)
    assert changed.combiner_artifact.facts["threshold"] > ALWAYS_SEARCH


@pytest.mark.slow
def test_a_killed_attaching_goes_on_to_the_same_bytes(attached, tmp_path, monkeypatch):
    source = read_json(attached.directory / "corpus" / "manifest.json")["settings"]["source"]["path"]
    texts = [*map(type(tmp_path), source)]
    given = str(attached.base.folder.path), texts, tmp_path / "killed"
    how = {"settings": attached.settings, "execution": ON_CPU}

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[attach.__module__], "fit_combiner", killed)
        with pytest.raises(KeyboardInterrupt):
            attach(*given, **how)
    with pytest.raises(InputError, match=r"no attached\.json"):
        Attached(tmp_path / "killed", CPU)
    resumed = attach(*given, **how)
    for name in ("mixture.safetensors", "policy.safetensors"):
        assert (resumed.combiner_artifact.directory / name).read_bytes() == (
            attached.combiner_artifact.directory / name
        ).read_bytes()
    assert resumed.combiner_artifact.facts == attached.combiner_artifact.facts


@pytest.mark.slow
def test_the_papers_gate_can_be_asked_for(copy, tmp_path):
    source = read_json(copy.directory / "corpus" / "manifest.json")["settings"]["source"]["path"]
    settings = copy.settings.model_copy(update={"combiner": "gate"})
    gated = attach(
        str(copy.base.folder.path), [*map(type(tmp_path), source)], copy.directory, settings=settings, execution=ON_CPU
    )
    figures = gated.combiner_artifact.facts["figures"]["test"]
    assert figures["gate"] < figures["plain"]
    assert gated.combiner is gated.combiners["gate"]
    hidden = torch.randn(3, gated.base.model.width)
    retrieved = gated.search(gated.memory.keys_of(hidden))
    combined = gated.combiner.combine(gated.base.model, hidden, retrieved)
    np.testing.assert_allclose(combined.log_probabilities.exp().sum(-1), 1, atol=1e-4)


@pytest.mark.parametrize("held_out", [10**6, 300])
def test_every_token_of_dev_and_test_is_read_at_most_once(attached, monkeypatch, held_out):
    """The states of those that have keys are known, whether the whole split is used or beginnings of its documents."""
    base, corpus = attached.base, attached.corpus
    settings = attached.settings.model_copy(update={"held_out": held_out, "positions": 500})
    remembered = _remember_training(base, corpus, attached.memory.directory, settings=settings, execution=ON_CPU)
    search = _search_of_training(corpus, remembered, settings, index=attached.directory / "index")
    read = []
    kept = type(base).hidden
    monkeypatch.setattr(
        type(base), "hidden", lambda self, text, title: read.append((title, len(text))) or kept(self, text, title)
    )
    found = ExampleSets.collect(base, corpus, search, learned=remembered.learned, settings=settings)
    for split, part in (("dev", found.dev), ("test", found.test)):
        assert (len(part) < len(corpus.split(split))) == (held_out == 300)
    (only,) = read
    assert "as questions" in only[0]
    again = kept(base, found.test_text, "read test")
    torch.testing.assert_close(found.test.base.hidden, again, rtol=5e-3, atol=5e-3)


def test_a_policy_learns_where_a_search_pays(examples):
    base = examples.train.base
    direction = torch.linspace(-1, 1, base.hidden.shape[-1])
    gains = torch.tanh(torch.nn.functional.layer_norm(base.hidden, base.hidden.shape[-1:]) @ direction)
    policy = learn_policy(PolicySettings(passes=20), base.hidden, gains)
    predicted = policy(base.hidden)
    assert torch.corrcoef(torch.stack([predicted, gains]))[0, 1] > 0.8
    for share in (0.1, 0.3, 0.7):
        assert (predicted > search_threshold(predicted, share)).float().mean() == pytest.approx(share, abs=0.01)
    assert (predicted > search_threshold(predicted, 1.0)).all()
    assert not (predicted > search_threshold(predicted, 0.0)).any()


def test_the_curve_begins_with_the_plain_model_and_ends_with_everything_searched(attached):
    curve, figures = attached.combiner_artifact.facts["curve"], attached.combiner_artifact.facts["figures"]["test"]
    # Where nothing is searched for, exact matches are still there.
    assert figures["adaptive"] < curve[0]["perplexity"] < figures["plain"]
    assert curve[0]["perplexity"] == pytest.approx(figures["adaptive, exact only"], rel=0.1)
    assert curve[-1]["perplexity"] == figures["adaptive"]
    assert [point["searched"] for point in curve] == sorted(point["searched"] for point in curve)


def test_unsearched_positions_move_on_from_the_one_before(attached, examples):
    """Against a loop over positions, with dictionaries."""
    entries, text, part = attached.memory.entries(), attached.corpus.split("test"), examples.test
    chosen = torch.from_numpy(np.random.default_rng(5).random(len(text)) < 0.3)
    found = advance_unsearched(part, chosen, text, entries=entries)
    held = entries.live_documents
    have: dict[int, float] = {}
    for position in range(300):
        if chosen[position]:
            there = part.retrieved.present[position]
            ids, distances = part.retrieved.ids[position][there], part.retrieved.distances[position][there]
            have = dict(zip(ids.tolist(), distances.tolist()))
        elif position in text.begins:
            have = {}
        else:
            came = int(part.targets[position - 1])
            right = {id: gap for id, gap in have.items() if entries.tokens_of(np.array([id]))[0] == came}
            same = {id for id in right if held.index_of(np.array(id)) == held.index_of(np.array(id + 1))}
            have = {id + 1: gap for id, gap in right.items() if id in same}
        there = found.present[position]
        assert dict(zip(found.ids[position][there].tolist(), found.distances[position][there].tolist())) == have
    looked = Retrieved.from_ids(found.ids.numpy(), found.distances.numpy(), entries)
    assert torch.equal(looked.tokens[found.present], found.tokens[found.present])


@pytest.mark.parametrize("reach", [None, 4])
def test_a_texts_own_past_is_what_a_loop_finds(reach):
    random = np.random.default_rng(2)
    keys, tokens = random.normal(size=(23, 5)).astype("<f2"), random.integers(0, 9, 23)
    found = nearest_in_past(keys, tokens, 3, reach=reach)
    for position in range(23):
        first = 0 if reach is None else max(0, position - reach)
        exact = keys.astype(float)
        gaps = {j: float(((exact[position] - exact[j]) ** 2).sum()) for j in range(first, position)}
        nearest = sorted(gaps, key=gaps.get)[:3]
        there = found.present[position]
        assert found.tokens[position][there].tolist() == [int(tokens[j]) for j in nearest]
        np.testing.assert_allclose(found.distances[position][there], [gaps[j] for j in nearest], rtol=1e-3, atol=1e-3)


def test_two_lists_of_neighbours_become_one():
    def retrieved(tokens, distances):
        return Retrieved(torch.tensor([tokens]), torch.tensor([distances]), torch.tensor([tokens]))

    both = merge_nearest(retrieved([1, 2], [0.5, 3.0]), retrieved([3, 4], [1.0, math.inf]), 3)
    assert both.tokens.tolist() == [[1, 3, 2]]
    assert both.distances.tolist() == [[0.5, 1.0, 3.0]]


def test_static_and_dynamic_figures_of_a_text(attached, tmp_path):
    """A text that repeats itself gains from its own past; that of the memory as it is does not change."""
    line = "ka1 lo2 mi3 nu4 ka5 lo6 mi7 nu8 .\n"
    (tmp_path / "new.txt").write_text(line * 12)
    version = attached.memory.versions()[-1]
    found = score_files(attached, [tmp_path / "new.txt"])
    assert found["dynamic"]["growing"] < found["static"]["adaptive"]
    assert found["dynamic"]["cache"] < found["static"]["plain"]
    assert attached.memory.versions()[-1] == version, "nothing of it is kept"
    (tmp_path / "doc3.txt").write_text(line)
    with pytest.raises(InputError, match=r"doc3\.txt"):
        score_files(attached, [tmp_path / "doc3.txt"])


def test_settings_that_cannot_be_met_are_told(tmp_path):
    with pytest.raises(InputError, match="stride"):
        AttachSettings.parse({"context": 64, "stride": 128}, "settings")
    with pytest.raises(InputError, match="no model"):
        attach(
            str(tmp_path / "none" / "such"), [tmp_path], tmp_path / "out", settings=AttachSettings(), execution=ON_CPU
        )


def test_one_document_is_told_before_any_key_is_made(attached, tmp_path, monkeypatch, capsys):
    """The exclusion falls back to a window around the position."""
    text = tmp_path / "book.txt"
    text.write_text("ka1 lo2 mi3 nu4 ka5 lo6 mi7 nu8 .\n" * 40)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[attach.__module__], "choose_memory", stop)
    with pytest.raises(KeyboardInterrupt):
        attach(str(attached.base.folder.path), [text], tmp_path / "out", settings=attached.settings, execution=ON_CPU)
    assert "one document holds 100% of the training text" in capsys.readouterr().err
    assert not (tmp_path / "out" / "memory").exists()
