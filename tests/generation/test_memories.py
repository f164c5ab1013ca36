"""Several memories beside one model: searched as if they were one, chosen by name, changed one by one."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import spalm
from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.generation import AnswerBatch, AnswerRequest, GenerationOptions, Model, Sampling, UnknownMemory
from spalm.generation.documents import DocumentExists, UnknownDocument
from spalm.memory import Memory, remember
from support.commands import refused
from support.commands import spalm as command
from support.model_folders import rewrite
from support.servers import copied
from support.several_memories import CPU, NORTH, SOUTH, MemoryFoldersOfTests, trusting, write_memories
from support.tiny_models import write_model

MIXED = "zz9 qq8 zz7 ka1 .\nxx1 yy2 xx3 mi4 .\nka1 lo3 mi4 .\nmi7 nu9 zz3"
PROMPTS = ["zz9 qq8 zz7 qq6", "xx1 yy2 xx3", "mi7 nu9", "ka1 lo3 mi4 .\nka2"]


@pytest.fixture(scope="module")
def folders(attached_folder, tmp_path_factory) -> MemoryFoldersOfTests:
    return write_memories(attached_folder, tmp_path_factory.mktemp("memories"))


@pytest.fixture(scope="module")
def model(folders) -> Model:
    """With three memories."""
    return spalm.load(folders.own, memories=folders.further, execution=CPU)


@pytest.fixture(scope="module")
def whole(folders) -> Model:
    """With one memory that holds what the three hold."""
    return spalm.load(folders.whole, execution=CPU)


@pytest.mark.parametrize("change", [lambda model: model, trusting], ids=["mixture", "knn-lm"])
@pytest.mark.parametrize("text", [MIXED, NORTH, SOUTH])
def test_it_makes_no_difference_how_documents_are_divided(model, whole, change, text):
    found, expected = change(model).score(text), change(whole).score(text)
    for one, other in zip(found.tokens, expected.tokens, strict=True):
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-4), one.text
    own = change(model).score(text, memories=["own"])
    assert own.perplexity > found.perplexity + 1, "the others took part"


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("draft", [False, True])
def test_answers_and_citations_are_those_of_one_memory(model, whole, prompt, draft):
    """In the one memory a document's name begins with the number of the memory that has it otherwise."""
    numbers = {"own": "", "north": "0 ", "south": "1 "}
    found, expected = (trusting(each).generate(prompt, max_tokens=12, draft=draft) for each in (model, whole))
    assert found.text == expected.text
    shares = [[token.memory_share for token in each.tokens] for each in (found, expected)]
    np.testing.assert_allclose(*shares, atol=1e-3)
    places = [
        [(each.start, each.end, [(numbers[s.memory] + s.document, s.offset) for s in each.sources]) for each in cited]
        for cited in (found.citations, [replace_memory(each) for each in expected.citations])
    ]
    assert places[0] == places[1]


def replace_memory(citation):
    return replace(citation, sources=[replace(source, memory="own") for source in citation.sources])


def test_each_citation_names_its_memory(model):
    answer = trusting(model).generate("zz9 qq8 zz7 qq6", max_tokens=8)
    assert (answer.citations[0].memory, answer.citations[0].document) == ("north", "map.md")
    for names in (["north"], ["south"], ["own"]):
        cited = trusting(model).generate("zz9 qq8 xx7", max_tokens=8, memories=names).citations
        assert {source.memory for each in cited for source in each.sources} == {*names}


def test_passages_are_ranked_as_in_one_memory(model, whole):
    found, expected = (each.passages("zz9 qq8 mi7 yy2 lo3", count=8) for each in (model, whole))
    assert [(each.text, each.offset) for each in found] == [(each.text, each.offset) for each in expected]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected])
    assert {"north", "south"} <= {each.memory for each in found}
    for south in (["south"], "south"):
        assert {each.memory for each in model.passages("zz9 qq8 yy2", count=8, memories=south)} == {"south"}
    answer = model.generate("zz9 qq8 zz7", passages=1, memories=["north"], max_tokens=2)
    assert [(each.memory, each.document) for each in answer.passages] == [("north", "map.md")]


@pytest.mark.parametrize("name", ["north", "south"])
def test_a_chosen_memory_is_what_it_is_alone(model, folders, name):
    alone = spalm.load(folders.further[name], execution=CPU)
    found, expected = model.score(MIXED, memories=[name]), alone.score(MIXED)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
    answers = [
        trusting(each).generate(PROMPTS[0], max_tokens=8, memories=[chosen])
        for each, chosen in ((model, name), (alone, folders.further[name].name))
    ]
    assert answers[0].text == answers[1].text
    assert answers[0].citations == answers[1].citations


def test_choosing_none_is_the_model_alone(model):
    none, off = (model.generate(PROMPTS[0], max_tokens=9, **how) for how in ({"memories": []}, {"memory": False}))
    assert none.text == off.text
    assert none.citations == []
    assert all(token.memory_share == 0 for token in none.tokens)
    assert model.passages(PROMPTS[0], memories=[]) == []
    score = model.score(NORTH, memories=[])
    assert score.perplexity == pytest.approx(score.perplexity_without_memory, rel=1e-5)


def finish(batch: AnswerBatch, texts: dict[int, str]) -> None:
    while batch.running:
        for answer, chunks in batch.step():
            texts[id(answer)] += "".join(chunk.text for chunk in chunks)


CHOICES = [None, ["north"], ["south"], ["own", "south"], []]


def test_answers_with_different_memories_side_by_side_are_what_each_is_alone(model):
    chosen = trusting(model)
    tokens = chosen.tokeniser.prompt(PROMPTS[0])
    expected = [chosen.generate(PROMPTS[0], max_tokens=9, memories=names) for names in CHOICES]
    assert len({answer.text for answer in expected}) > 2, "the choice matters"
    batch = AnswerBatch(chosen, slots=len(CHOICES))
    options = GenerationOptions(Sampling(max_tokens=9), cite=True)
    asked = [AnswerRequest(tokens, options, memories=chosen.models.memories.select(names)) for names in CHOICES]
    answers = [batch.add(request) for request in asked]
    texts = {id(answer): "" for answer in answers}
    finish(batch, texts)
    assert [texts[id(answer)] for answer in answers] == [answer.text for answer in expected]


def test_what_was_read_for_other_memories_is_not_read_on_from(model):
    """A client must not find out by time which passages of a memory others were given."""
    prompt = model.tokeniser.prompt("ka1 " * 20)
    batch = AnswerBatch(model, slots=3)
    for names, reused in ((["north"], 0), (["south"], 0), (["north"], len(prompt) - 1), ([], 0)):
        before, selected = batch.reused_tokens, model.models.memories.select(names)
        answer = batch.add(AnswerRequest(prompt, GenerationOptions(Sampling(max_tokens=2)), memories=selected))
        finish(batch, {id(answer): ""})
        assert batch.reused_tokens - before == reused, names


class Sometimes:
    """A policy that wants a search at every third position."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, hidden) -> float:  # noqa: ARG002
        self.asked += 1
        return float(self.asked % 3 == 1)


def test_neighbours_are_moved_on_in_several_memories_as_in_one(model, whole):
    texts = [
        replace(trusting(each), policy=Sometimes(), threshold=0.5).generate(prompt, max_tokens=12).text
        for prompt in PROMPTS[:2]
        for each in (model, whole)
    ]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]


def test_entries_of_several_memories_are_looked_up_by_their_ids(model):
    names = list(model.models.memories.names)
    held = [model.memories[name].store.entries() for name in names]
    joined = model.models.memories.select().entries()
    documents = joined.live_documents
    assert (np.diff(documents.first_ids) > 0).all()
    assert documents.names == [name for each in held for name in each.live_documents.names]
    own = np.concatenate([each.live_documents.first_ids for each in held])
    number = np.repeat(np.arange(len(held)), [len(each.live_documents) for each in held])
    ids = documents.first_ids + 1
    assert joined.tokens_of(np.append(ids, -1)).tolist() == [
        *(int(held[n].tokens_of(np.array([first + 1]))[0]) for n, first in zip(number, own)),
        -1,
    ]
    assert (joined.rows(ids) >= 0).all()
    assert (joined.rows(ids + (len(held) << 48)) == -1).all()
    assert (documents.index_of(ids) == np.arange(len(ids))).all()


# Changes


@pytest.fixture
def changing(folders, tmp_path) -> Model:
    own, north = (copied(path, tmp_path / path.name) for path in (folders.own, folders.north))
    return spalm.load(own, memories=[north], execution=CPU)


def test_documents_are_added_to_and_forgotten_in_the_memory_that_is_named(changing):
    assert [*changing.memories] == ["own", "north"]
    text = "vv1 ww2 vv3 ww4 vv5 .\n" * 2
    before, own = trusting(changing).score(text).perplexity, len(changing.memory)
    changing.memories["north"].add("new.md", text)
    assert trusting(changing).score(text).perplexity < before / 2
    assert trusting(changing).score(text, memories=["own"]).perplexity > before / 2
    answer = trusting(changing).generate("vv1 ww2", max_tokens=4)
    assert (answer.citations[0].memory, answer.citations[0].document) == ("north", "new.md")
    assert [each.memory for each in changing.passages("ww2 vv3")] == ["north"]
    assert len(changing.memory) == own
    with pytest.raises(DocumentExists):
        changing.memories["north"].add("new.md", text)
    with pytest.raises(UnknownDocument):
        changing.memory.forget("new.md")
    changing.memories["north"].forget("new.md")
    assert trusting(changing).score(text).perplexity == pytest.approx(before, rel=1e-3)
    assert changing.passages("ww2 vv3") == []


def test_a_memory_alone_that_was_read_in_other_windows_is_searched_and_changed(changing, tmp_path):
    encoder = changing.encoder
    other = replace(encoder, reading=replace(encoder.reading, segment=32, stride=16))
    memory = Memory.create(tmp_path / "alone", {**other.identity, "width": other.width})
    tokens = changing.tokeniser.encode([b"vv1 ww2 vv3 ww4 vv5 .\n"])[0]
    stream = TokenStream(tokens, np.array([len(tokens)]), lambda: ["first"], start=changing.tokeniser.start)
    remember(memory, other, stream, source={"text": "first"})
    changing.models.open_memories({"alone": memory.directory})
    model = replace(trusting(changing))
    answer = model.generate("vv1 ww2", max_tokens=3)
    assert answer.citations[0].memory == "alone"
    model.memories["alone"].add("second", "ww7 vv8 ww9 .\n")
    assert Memory(memory.directory).entries().with_keys.live_documents.names == ["first", "second"]
    assert "index" not in {path.name for path in memory.directory.iterdir()}, "compact would leave it as it is"


def test_a_memory_without_keys_is_matched_exactly(changing, tmp_path):
    memory = Memory.create(tmp_path / "exact", changing.memory.store.identity)
    tokens = changing.tokeniser.encode([b"vv1 ww2 vv3 ww4 vv5 .\n" * 3])[0]
    stream = TokenStream(tokens, np.array([len(tokens)]), lambda: ["only"], start=changing.tokeniser.start)
    remember(memory, None, stream, source={"text": "only"})
    before = changing.score("vv1 ww2 vv3 ww4 vv5 .\n").perplexity
    changing.models.open_memories({"exact": memory.directory})
    assert changing.score("vv1 ww2 vv3 ww4 vv5 .\n").perplexity != pytest.approx(before, rel=1e-3)
    nearest = changing.models.memories.select(["exact"]).nearest(np.zeros((2, memory.width), np.float16))
    assert nearest.ids.shape == (2, 0)


def test_an_unpacked_memory_is_opened_without_its_base_model(folders, tmp_path):
    spalm_pack = tmp_path / "north.tar"
    assert command("pack", folders.north, spalm_pack).returncode == 0
    assert command("unpack", spalm_pack, tmp_path / "sent").returncode == 0
    rewrite(tmp_path / "sent" / "attached.json", model="/nowhere/at/all")
    model = spalm.load(folders.own, memories=[tmp_path / "sent"], execution=CPU)
    assert trusting(model).generate(PROMPTS[0], max_tokens=3).citations[0].memory == "sent"


# What is refused


def test_what_cannot_be_opened_is_refused_in_one_line(attached_folder, folders, tmp_path, finished):
    other = write_model(tmp_path / "model", "llama", "ka1 lo2 mi3 .\n" * 50, seed=5)
    strange = copied(folders.north, tmp_path / "strange")
    identity = Memory(strange / "memory").identity
    shutil.rmtree(strange / "memory")
    Memory.create(strange / "memory", {**identity, "encoder": {**identity["encoder"], "digest": "0" * 64}})
    wide = tmp_path / "wide"
    Memory.create(wide, {**identity, "width": 7})
    for given, why in (
        ([strange], "is a memory of another model than"),
        ([other], "holds no memory"),
        ([wide], "keys of another kind"),
        ([tmp_path / "nothing"], "holds no memory"),
        ([finished.directory], "is a run"),
        ([folders.own], "is open already|a memory 'own' is open already"),
        ([f"again={folders.own}"], "is open already; give it once"),
        ([folders.north, folders.north], "a memory 'north' is open already"),
        ([folders.north, f"x={folders.north / 'memory'}"], "is open already; give it once"),
        ({"": folders.north}, "cannot be the name of a memory"),
        ({"a\nb": folders.north}, "cannot be the name of a memory"),
    ):
        with pytest.raises(InputError, match=why) as error:
            spalm.load(folders.own, memories=given, execution=CPU)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="is a run, which has one memory"):
        spalm.load(finished.directory, memories=[folders.north], execution=CPU)
    with pytest.raises(InputError, match="is open already; give it once"):
        spalm.load(folders.own, memories={"x": Path(attached_folder), "y": Path(attached_folder)}, execution=CPU)


def test_unknown_names_are_refused(model):
    for ask in (
        lambda: model.generate("x", memories=["nroth"]),
        lambda: model.score("x", memories=["north", "nroth"]),
        lambda: model.passages("x", memories=["nroth"]),
    ):
        with pytest.raises(UnknownMemory, match="there is no memory 'nroth'; open are 'own', 'north', 'south'"):
            ask()


@pytest.mark.slow
def test_the_command_uses_and_names_them(folders):
    asked = ["generate", folders.own, "zz9 qq8 zz7", "--max-tokens", 6, "--passages", 1]
    found = command(*asked, "--memory", folders.north, "--memory", f"South={folders.south}")
    assert found.returncode == 0, found.stderr
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("passage of ")]
    assert line.startswith("passage of north: map.md, token ")
    assert refused(*asked, "--memory", folders.north, "--no-memory")
    assert refused(*asked, "--memory", folders.own)


def test_names_come_before_folders():
    from spalm.generation import named_folders

    assert named_folders(["A=x/y", "x/y", "x=1/y=2"]) == [("A", Path("x/y")), (None, Path("x/y")), ("x", Path("1/y=2"))]
    assert named_folders("x/y") == [(None, Path("x/y"))]
    assert named_folders(["./x=1/y"]) == [(None, Path("./x=1/y"))]
    assert named_folders({"A=": "z"}) == [("A=", Path("z"))]
