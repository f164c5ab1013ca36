"""Text from a model with a memory: what is picked, what is shown, and what is cited."""

import shutil
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from spalm.compute import Hardware
from spalm.corpus import TokenStream
from spalm.generation.generate import Cited, Reader, Sampling, Span, Written, generate, go_on, spans, until
from spalm.generation.generate import _pick as pick
from spalm.generation.model import Live, open_live
from spalm.memory import remember
from spalm.semiparametric import CombinedPrediction, Knn, KnnCombiner, PlainCombiner, Retrieved, advance_neighbours

PROMPT = "ka1 lo3 mi4 .\nka2"


@pytest.fixture(scope="module")
def live(attached_folder) -> Live:
    return open_live(attached_folder, Hardware("cpu", 1))


@pytest.fixture(scope="module")
def own_live(finished) -> Live:
    return open_live(finished.directory, Hardware("cpu", 1))


@pytest.fixture(params=["live", "own_live"])
def any_live(request) -> Live:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("use_memory", [True, False])
def test_greedy_is_what_transformers_generates(any_live, use_memory, attached_folder, finished):
    hugging_face = pytest.importorskip("spalm.serving.hugging_face")
    folder = attached_folder if any_live.policy is None and any_live.longest else finished.directory
    model = hugging_face.SpalmForCausalLM.from_pretrained(folder)
    model.use_memory = use_memory
    prompt = any_live.tokeniser.prompt(PROMPT)
    given = prompt if model.pretrained else [model.config.bos_token_id, *prompt[1:]]
    expected = model.generate(torch.tensor([given]), max_new_tokens=23, do_sample=False)[0, len(given) :].tolist()
    found = list(generate(any_live, prompt, Sampling(max_tokens=23), use_memory=use_memory))
    assert [each.token for each in found] == expected


def test_pieces_join_to_the_answer(any_live):
    written = list(generate(any_live, any_live.tokeniser.prompt(PROMPT), Sampling(max_tokens=40)))
    answer = [each.token for each in written if each.token not in any_live.tokeniser.end_tokens]
    decode, before = any_live.tokeniser.decode, any_live.tokeniser.prompt(PROMPT)
    assert "".join(each.text for each in written) == decode([*before, *answer])[len(decode(before)) :]


def test_log_probabilities_are_the_models(any_live):
    prompt = any_live.tokeniser.prompt(PROMPT)
    for each in generate(any_live, prompt, Sampling(max_tokens=5, temperature=1.5, seed=3), likely=4):
        heard = any_live.follow().feed(prompt)[-1:]
        expected = any_live.combiner.combine(any_live.model, heard.hidden, any_live.search(heard.keys))
        assert each.log_probability == pytest.approx(float(expected.log_probabilities[0, each.token]), abs=1e-3)
        best = expected.log_probabilities[0].topk(4)
        assert [token for token, _ in each.likely] == best.indices.tolist()
        np.testing.assert_allclose([score for _, score in each.likely], best.values.numpy(), atol=1e-3)
        prompt = [*prompt, each.token]


# What is picked

PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [0.1, 0.4, 0.05, 0.25, 0.2]),
        ({"temperature": 0.5}, [p**2 / 0.275 for p in (0.1, 0.4, 0.05, 0.25, 0.2)]),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_k": 9}, [0.1, 0.4, 0.05, 0.25, 0.2]),
        ({"top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_p": 0.7}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.4}, [0, 1, 0, 0, 0]),
        # The share is one of what is left: of 0.65, not of all.
        ({"top_k": 2, "top_p": 0.62}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_k": 2, "top_p": 0.61}, [0, 1, 0, 0, 0]),
    ],
)
def test_samples_have_the_distribution_that_is_asked_for(how, expected):
    sampling, chance = Sampling(**{"temperature": 1.0, **how}), torch.Generator().manual_seed(0)
    counts = Counter(pick(PROBABILITIES.log(), sampling, chance) for _ in range(4000))
    np.testing.assert_allclose([counts[token] / 4000 for token in range(5)], expected, atol=0.03)
    assert all(counts[token] == 0 for token in range(5) if not expected[token])


def test_without_temperature_the_likeliest_is_picked():
    assert {pick(PROBABILITIES.log(), Sampling(), torch.Generator()) for _ in range(9)} == {1}


def test_samples_follow_the_seed(any_live):
    def sample(seed: int | None) -> list[int]:
        sampling = Sampling(max_tokens=20, temperature=1.5, seed=seed)
        return [each.token for each in generate(any_live, any_live.tokeniser.prompt(PROMPT), sampling)]

    assert sample(1) == sample(1) != sample(2)
    assert sample(None) != sample(None)


# What is shown


@dataclass
class Scripted:
    """A reader in whose opinion certain tokens come."""

    live: Live
    script: list[int]

    def feed(self, tokens):  # noqa: ARG002
        return None

    def predict(self, heard, last):  # noqa: ARG002
        scores = torch.full((1, self.live.tokeniser.size), -9.0)
        scores[0, self.script.pop(0)] = 0.0
        return CombinedPrediction(scores, torch.ones(1), torch.zeros(1, 0)), Retrieved.empty(1)


def written_of(live: Live, text: str, end: bool = False) -> list[Written]:
    script = live.tokeniser.encode([text.encode()])[0].tolist() + ([min(live.tokeniser.end_tokens)] if end else [])
    return list(go_on(Scripted(live, list(script)), None, live.tokeniser.start, Sampling(max_tokens=len(script))))


def test_a_letter_comes_with_its_last_token(live):
    written = written_of(live, "a🦜é.")
    assert [each.text for each in written] == ["a", "", "", "", "🦜", "", "é", "."]


def test_an_answer_that_ends_within_a_letter_shows_what_there_is(live):
    written = written_of(live, "a🦜")[:3]
    script = [each.token for each in written]
    cut = list(go_on(Scripted(live, script), None, live.tokeniser.start, Sampling(max_tokens=3)))
    assert "".join(each.text for each in cut) == "a\ufffd"
    assert cut[-1].finished == "length"


def test_an_answer_tells_why_it_ended(live):
    assert [each.finished for each in written_of(live, "ab")] == [None, "length"]
    ended = written_of(live, "ab", end=True)
    assert [(each.text, each.finished) for each in ended] == [("a", None), ("b", None), ("", "stop")]


def tokens(*texts: str, finished: str = "length") -> list[Written]:
    last = len(texts) - 1
    return [Written(n, text, 0.0, 0.0, finished=finished if n == last else None) for n, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "stops", "expected"),
    [
        (["ab", "c", "de"], [], "abcde"),
        (["ab", "c", "de"], ["cd"], "ab"),
        (["ab", "c", "de"], ["zz", "bc", "cd"], "a"),
        (["a", "a", "a", "b"], ["aab"], "a"),
        (["x\n", "\n", "y"], ["\n\n"], "x"),
        (["stop", "!"], ["stop"], ""),
        (["sto", "re"], ["stop"], "store"),
        (["sto"], ["stop"], "sto"),
        (["", "st", "", "op", "x"], ["stop"], ""),
        (["abcd"], ["bc", "abcd"], ""),
    ],
)
def test_a_stop_ends_the_answer_and_is_not_shown(texts, stops, expected):
    parts = list(until(iter(tokens(*texts)), stops))
    assert "".join(part.text for part in parts) == expected
    whole = "".join(texts)
    assert parts[-1].finished == ("stop" if any(stop in whole for stop in stops) else "length")
    assert "".join(each.text for part in parts for each in part.written) == expected
    assert all(part.finished is None for part in parts[:-1])


@pytest.mark.parametrize("stops", [["abb"], ["ba", "bba"], ["aa", "abab"], ["b\n"]])
def test_what_is_shown_is_never_taken_back(stops):
    """Any answer in any pieces: all that came so far is the beginning of what the cut answer is in the end."""
    random = np.random.default_rng(0)
    for _ in range(200):
        texts = ["".join(random.choice(list("ab\n"), random.integers(0, 4))) for _ in range(random.integers(1, 9))]
        whole = "".join(texts)
        expected = whole[: min([whole.find(stop) for stop in stops if stop in whole], default=len(whole))]
        shown = ""
        for part in until(iter(tokens(*texts)), stops):
            shown += part.text
            assert expected.startswith(shown)
        assert shown == expected


def test_nothing_is_asked_of_the_model_after_a_stop():
    asked = []

    def noted(answer):
        for each in answer:
            asked.append(each)
            yield each

    list(until(noted(tokens("a", "b", "c", "d")), ["b"]))
    assert len(asked) == 2


# Where it comes from


@pytest.fixture(scope="module")
def planted(attached_folder, tmp_path_factory) -> tuple[Live, list[int]]:
    """With one more document, whose text is nowhere else, and a memory that is trusted: its ids."""
    live = open_live(shutil.copytree(attached_folder, tmp_path_factory.mktemp("planted") / "copy"), Hardware("cpu", 1))
    ids = live.tokeniser.encode([b"Zebras (quagga) = 4711; okapi? No: GNU! 99% of it @ home."])[0]
    stream = TokenStream(ids, np.array([len(ids)]), lambda: ["zoo"], live.tokeniser.start)
    remember(live.memory, live.encoder, stream, {"text": "zoo"})
    return replace(live, combiner=KnnCombiner(PlainCombiner(), Knn(0.95, 0.01, 4))), ids.tolist()


def test_a_text_of_one_document_is_cited_with_its_place(planted):
    live, ids = planted
    prompt, rest = [live.tokeniser.start, *ids[:7]], ids[7:]
    written = list(generate(live, prompt, Sampling(max_tokens=len(rest)), cite=True))
    assert [each.token for each in written] == rest
    for place, each in enumerate(written, 7):
        assert each.memory > 0.5
        assert (each.cited[0].document, each.cited[0].offset) == ("zoo", place)
    (span,) = spans(written)
    assert (span.start, span.end) == (0, len("".join(each.text for each in written)))
    assert (span.sources[0].document, span.sources[0].offset) == ("zoo", 7)


def test_without_its_memory_nothing_is_cited(planted):
    live, ids = planted
    written = list(
        generate(live, [live.tokeniser.start, *ids[:7]], Sampling(max_tokens=9), cite=True, use_memory=False)
    )
    assert all(each.memory == 0 and not each.cited for each in written)
    assert spans(written) == []


def test_the_memorys_part_is_what_it_added(planted):
    live, ids = planted
    prompt = [live.tokeniser.start, *ids[:7]]
    each = next(generate(live, prompt, Sampling(), cite=True))
    heard = live.follow().feed(prompt)[-1:]
    plain = float(live.model.log_probabilities(heard.hidden)[0, each.token].exp())
    together = float(np.exp(each.log_probability))
    assert each.memory == pytest.approx((together - 0.05 * plain) / together, abs=1e-4)


def test_spans_join_tokens_and_documents():
    def token(text: str, memory: float, *cited: tuple[str, int, float]) -> Written:
        return Written(0, text, 0.0, memory, [Cited(*each) for each in cited])

    found = spans(
        [
            token("one ", 0.2, ("x", 1, 0.9)),
            token("two ", 0.9, ("a", 12, 0.5), ("b", 3, 0.4)),
            token("three", 0.8, ("b", 4, 0.6)),
            token("!", 0.5),
            token("", 0.9, ("c", 0, 1.0)),
            token("four", 0.7, ("c", 1, 1.0)),
        ]
    )
    assert [(span.start, span.end) for span in found] == [(4, 13), (14, 18)]
    assert [(source.document, source.offset) for source in found[0].sources] == [("b", 3), ("a", 12)]
    assert found[0].sources[0].weight == pytest.approx(1.0)
    assert found[1] == Span(14, 18, [Cited("c", 0, 2.0)])


# Where it searches


@dataclass
class Budget:
    """A policy that says what it was told to."""

    says: list[float]

    def __call__(self, hidden) -> torch.Tensor:
        assert len(hidden) == 1
        return torch.tensor([self.says.pop(0)])


def test_positions_that_are_not_searched_have_the_neighbours_before_them_moved_on(planted):
    live, ids = planted
    reader = Reader(replace(live, policy=Budget([0.1, 0.9, 0.1, 0.2, 0.9]), threshold=0.5))
    prompt = [live.tokeniser.start, *ids[:12]]
    heard, entries = live.follow().feed(prompt), live.memory.entries()
    found = [reader.predict(heard[place : place + 1], prompt[place])[1] for place in range(5)]
    assert found[0].ids.shape == (1, 0)
    searched = live.search(heard.keys)
    for place in (1, 4):
        assert torch.equal(found[place].ids, searched.ids[place : place + 1])
    for place in (2, 3):
        assert torch.equal(
            found[place].ids, advance_neighbours(found[place - 1], torch.tensor([prompt[place]]), entries).ids
        )
        assert entries.source(int(found[place].ids[0, 0])).document == "zoo"


@pytest.mark.parametrize(("threshold", "use_memory"), [(-np.inf, True), (np.inf, False)])
def test_a_policy_of_always_or_never(live, threshold, use_memory):
    prompt = live.tokeniser.prompt(PROMPT)
    how = Sampling(max_tokens=12)
    expected = [each.token for each in generate(live, prompt, how, use_memory=use_memory)]
    budget = replace(live, policy=Budget([0.0] * 12), threshold=threshold)
    assert [each.token for each in generate(budget, prompt, how)] == expected
