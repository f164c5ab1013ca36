"""Text from a model with a memory: what is picked, what is shown, and what is cited."""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from spalm.compute import Hardware
from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.generation import (
    AnswerRequest,
    Chunk,
    Citation,
    CitedSource,
    Decoder,
    GeneratedToken,
    GenerationOptions,
    Model,
    RunningAnswer,
    Sampling,
    citations_of,
    generate_tokens,
    load_model,
)
from spalm.generation.decoding.generate import advance
from spalm.generation.decoding.sampling import pick_token, random_generator
from spalm.generation.decoding.stop_texts import StopTexts
from spalm.memory import remember
from spalm.memory.exact import reversed_context
from spalm.semiparametric import (
    CombinedPrediction,
    Knn,
    KnnCombiner,
    Matched,
    PlainCombiner,
    Retrieved,
    advance_neighbours,
)
from support.generation import generated
from support.servers import with_combiner

PROMPT = "ka1 lo3 mi4 .\nka2"


@pytest.fixture(scope="module")
def model(attached_folder) -> Model:
    return load_model(attached_folder, Hardware("cpu", 1))


@pytest.fixture(scope="module")
def run_model(finished) -> Model:
    return load_model(finished.directory, Hardware("cpu", 1))


@pytest.fixture(params=["model", pytest.param("run_model", marks=pytest.mark.slow)])
def any_model(request) -> Model:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("use_memory", [True, False])
def test_greedy_is_what_transformers_generates(any_model, use_memory):
    pytest.importorskip("transformers")
    model = any_model.to_transformers()
    model.use_memory = use_memory
    prompt = any_model.tokeniser.prompt(PROMPT)
    given = prompt if model.pretrained else [model.config.bos_token_id, *prompt[1:]]
    expected = model.generate(torch.tensor([given]), max_new_tokens=23, do_sample=False)[0, len(given) :].tolist()
    found = list(generated(any_model, prompt, Sampling(max_tokens=23), use_memory=use_memory))
    assert [each.id for each in found] == expected


def test_pieces_join_to_the_answer(any_model):
    written = list(generated(any_model, any_model.tokeniser.prompt(PROMPT), Sampling(max_tokens=40)))
    answer = [each.id for each in written if each.id not in any_model.tokeniser.end_tokens]
    decode, before = any_model.tokeniser.decode, any_model.tokeniser.prompt(PROMPT)
    assert "".join(each.text for each in written) == decode([*before, *answer])[len(decode(before)) :]


def matches(model: Model, prompt: list[int]) -> Matched:
    """Returns the exact matches of what was read, without the start symbol."""
    text = prompt[1:] if prompt[0] == model.tokeniser.start else prompt
    return Matched.of(model.store.exact.current().find(reversed_context(text)))


def test_log_probabilities_are_the_models(any_model):
    prompt = any_model.tokeniser.prompt(PROMPT)
    for each in generated(any_model, prompt, Sampling(max_tokens=5, temperature=1.5, seed=3), likely=4):
        encoded = any_model.decoder().feed(prompt)[-1:]
        retrieved = replace(any_model.search(encoded.keys), matched=matches(any_model, prompt))
        expected = any_model.combiner.combine(any_model.network, encoded.hidden, retrieved)
        assert each.log_probability == pytest.approx(float(expected.log_probabilities[0, each.id]), abs=1e-3)
        best = expected.log_probabilities[0].topk(4)
        assert [token for token, _ in each.likely] == best.indices.tolist()
        np.testing.assert_allclose([score for _, score in each.likely], best.values.numpy(), atol=1e-3)
        prompt = [*prompt, each.id]


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
    counts = Counter(pick_token(PROBABILITIES.log(), sampling, chance) for _ in range(4000))
    np.testing.assert_allclose([counts[token] / 4000 for token in range(5)], expected, atol=0.03)
    assert all(counts[token] == 0 for token in range(5) if not expected[token])


def test_without_temperature_the_likeliest_is_picked():
    assert {pick_token(PROBABILITIES.log(), Sampling(), torch.Generator()) for _ in range(9)} == {1}


@pytest.mark.parametrize("options", [{"temperature": 1e-40}, {"temperature": 1e-320}, {"top_p": 1e-320}, {"top_k": 1}])
def test_the_smallest_numbers_take_the_likeliest_token(options):
    sampling = Sampling(**{"temperature": 1.0, **options})
    assert {pick_token(PROBABILITIES.log(), sampling, torch.Generator()) for _ in range(9)} == {1}


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_every_seed_of_64_bits_can_be_used(seed):
    random_generator(Sampling(seed=seed), torch.device("cpu"))
    with pytest.raises(InputError, match="seed"):
        Sampling.parse({"seed": seed * 2}, "generate")


@pytest.mark.slow
def test_samples_follow_the_seed(any_model):
    def sample(seed: int | None) -> list[int]:
        sampling = Sampling(max_tokens=20, temperature=1.5, seed=seed)
        return [each.id for each in generated(any_model, any_model.tokeniser.prompt(PROMPT), sampling)]

    assert sample(1) == sample(1) != sample(2)
    assert sample(None) != sample(None)


# What is shown


@dataclass
class Scripted:
    """A decoder in whose opinion certain tokens come."""

    model: Model
    script: list[int]
    memories, at_once = None, 1

    def __len__(self):
        return 0

    @staticmethod
    def feed_together(decoders, pieces, needed):  # noqa: ARG004
        return [None]

    def predict(self, encoded, last):  # noqa: ARG002
        scores = torch.full((1, self.model.tokeniser.size), -9.0)
        scores[0, self.script.pop(0)] = 0.0
        return CombinedPrediction(scores, torch.ones(1), torch.zeros(1, 0)), Retrieved.empty(1)


def options(max_tokens: int) -> GenerationOptions:
    return GenerationOptions(Sampling(max_tokens=max_tokens))


def written_of(model: Model, text: str, end: bool = False) -> list[GeneratedToken]:
    script = model.tokeniser.encode([text.encode()])[0].tolist() + ([min(model.tokeniser.end_tokens)] if end else [])
    return list(generate_tokens(Scripted(model, list(script)), [model.tokeniser.start], options(len(script))))


def test_a_letter_comes_with_its_last_token(model):
    written = written_of(model, "a🦜é.")
    assert [each.text for each in written] == ["a", "", "", "", "🦜", "", "é", "."]


def test_an_answer_that_ends_within_a_letter_shows_what_there_is(model):
    written = written_of(model, "a🦜")[:3]
    script = [each.id for each in written]
    cut = list(generate_tokens(Scripted(model, script), [model.tokeniser.start], options(3)))
    assert "".join(each.text for each in cut) == "a\ufffd"
    assert cut[-1].finish_reason == "length"


def test_an_answer_tells_why_it_ended(model):
    assert [each.finish_reason for each in written_of(model, "ab")] == [None, "length"]
    ended = written_of(model, "ab", end=True)
    assert [(each.text, each.finish_reason) for each in ended] == [("a", None), ("b", None), ("", "stop")]


def tokens(*texts: str, finished: str = "length") -> list[GeneratedToken]:
    last = len(texts) - 1
    return [
        GeneratedToken(n, text, 0.0, 0.0, finish_reason=finished if n == last else None) for n, text in enumerate(texts)
    ]


def cut_at_stops(answer: list[GeneratedToken], stops: list[str]) -> Iterator[Chunk]:
    """The chunks of an answer, up to the last."""
    cutter = StopTexts(stops)
    for token in answer:
        chunk = cutter.add(token)
        yield chunk
        if chunk.finish_reason is not None:
            return


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
    parts = list(cut_at_stops(tokens(*texts), stops))
    assert "".join(part.text for part in parts) == expected
    whole = "".join(texts)
    assert parts[-1].finish_reason == ("stop" if any(stop in whole for stop in stops) else "length")
    assert "".join(each.text for part in parts for each in part.tokens) == expected
    assert all(part.finish_reason is None for part in parts[:-1])


@pytest.mark.parametrize("stops", [["abb"], ["ba", "bba"], ["aa", "abab"], ["b\n"]])
def test_what_is_shown_is_never_taken_back(stops):
    """Any answer in any pieces: all that came so far is the beginning of what the cut answer is in the end."""
    random = np.random.default_rng(0)
    for _ in range(200):
        texts = ["".join(random.choice(list("ab\n"), random.integers(0, 4))) for _ in range(random.integers(1, 9))]
        whole = "".join(texts)
        expected = whole[: min([whole.find(stop) for stop in stops if stop in whole], default=len(whole))]
        shown = ""
        for part in cut_at_stops(tokens(*texts), stops):
            shown += part.text
            assert expected.startswith(shown)
        assert shown == expected


def test_nothing_is_asked_of_the_model_after_a_stop(model):
    script = model.tokeniser.encode([b"ka1 lo2 mi3"])[0].tolist()
    decoder = Scripted(model, list(script))
    stop = Sampling(max_tokens=len(script), stop=[model.tokeniser.decode(script[1:2])])
    answer = RunningAnswer(AnswerRequest([model.tokeniser.start], GenerationOptions(stop)), decoder)
    while not answer.finished:
        answer.chunks(advance([answer.generation])[0])
    assert decoder.script == script[2:]


# Where it comes from


@pytest.fixture(scope="module")
def planted(attached_folder, tmp_path_factory) -> tuple[Model, list[int]]:
    """With one more document, whose text is nowhere else, and a memory that is trusted: its ids."""
    model = load_model(
        shutil.copytree(attached_folder, tmp_path_factory.mktemp("planted") / "copy"), Hardware("cpu", 1)
    )
    ids = model.tokeniser.encode([b"Zebras (quagga) = 4711; okapi? No: GNU! 99% of it @ home."])[0]
    stream = TokenStream(ids, np.array([len(ids)]), lambda: ["zoo"], start=model.tokeniser.start)
    remember(model.store, model.encoder, stream, source={"text": "zoo"})
    return with_combiner(model, KnnCombiner(PlainCombiner(), Knn(0.95, 0.01, 4))), ids.tolist()


def test_a_text_of_one_document_is_cited_with_its_place(planted):
    model, ids = planted
    prompt, rest = [model.tokeniser.start, *ids[:7]], ids[7:]
    written = list(generated(model, prompt, Sampling(max_tokens=len(rest)), cite=True))
    assert [each.id for each in written] == rest
    for place, each in enumerate(written, 7):
        assert each.memory_share > 0.5
        assert (each.sources[0].document, each.sources[0].offset) == ("zoo", place)
    (span,) = citations_of(written)
    assert (span.start, span.end) == (0, len("".join(each.text for each in written)))
    assert (span.sources[0].document, span.sources[0].offset) == ("zoo", 7)


def test_without_its_memory_nothing_is_cited(planted):
    model, ids = planted
    written = list(
        generated(model, [model.tokeniser.start, *ids[:7]], Sampling(max_tokens=9), cite=True, use_memory=False)
    )
    assert all(each.memory_share == 0 and not each.sources for each in written)
    assert citations_of(written) == []


def test_the_memorys_part_is_what_it_added(planted):
    model, ids = planted
    prompt = [model.tokeniser.start, *ids[:7]]
    each = next(generated(model, prompt, Sampling(), cite=True))
    encoded = model.decoder().feed(prompt)[-1:]
    plain = float(model.network.log_probabilities(encoded.hidden)[0, each.id].exp())
    together = float(np.exp(each.log_probability))
    assert each.memory_share == pytest.approx((together - 0.05 * plain) / together, abs=1e-4)


def test_spans_join_tokens_and_documents():
    def token(text: str, memory: float, *cited: tuple[str, int, float]) -> GeneratedToken:
        return GeneratedToken(0, text, 0.0, memory, [CitedSource(*each) for each in cited])

    found = citations_of(
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
    assert found[1] == Citation(14, 18, [CitedSource("c", 0, 2.0)])


# Where it searches


@dataclass
class Budget:
    """A policy that says what it was told to."""

    says: list[float]

    def __call__(self, hidden) -> torch.Tensor:
        assert len(hidden) == 1
        return torch.tensor([self.says.pop(0)])


def test_positions_that_are_not_searched_have_the_neighbours_before_them_moved_on(planted):
    model, ids = planted
    decoder = Decoder(replace(model, policy=Budget([0.1, 0.9, 0.1, 0.2, 0.9]), threshold=0.5))
    prompt = [model.tokeniser.start, *ids[:12]]
    encoded, entries = model.decoder().feed(prompt), model.store.entries()
    found = [decoder.predict(encoded[place : place + 1], prompt[place])[1] for place in range(5)]
    assert found[0].ids.shape == (1, 0)
    searched = model.search(encoded.keys)
    for place in (1, 4):
        assert torch.equal(found[place].ids, searched.ids[place : place + 1])
    for place in (2, 3):
        assert torch.equal(
            found[place].ids, advance_neighbours(found[place - 1], torch.tensor([prompt[place]]), entries).ids
        )
        assert entries.source(int(found[place].ids[0, 0])).document == "zoo"


def test_a_policy_that_always_searches_changes_nothing(model):
    prompt, how = model.tokeniser.prompt(PROMPT), Sampling(max_tokens=12)
    expected = [each.id for each in generated(model, prompt, how)]
    budget = replace(model, policy=Budget([0.0] * 12), threshold=-np.inf)
    assert [each.id for each in generated(budget, prompt, how)] == expected


def test_a_policy_that_never_searches_leaves_exact_matches(model):
    prompt = model.tokeniser.prompt(PROMPT)
    budget = replace(model, policy=Budget([0.0] * 12), threshold=np.inf)
    for each in generated(budget, prompt, Sampling(max_tokens=12)):
        retrieved = replace(Retrieved.empty(1), matched=matches(model, prompt))
        hidden = model.decoder().feed(prompt)[-1:].hidden
        expected = model.combiner.combine(model.network, hidden, retrieved).log_probabilities[0]
        assert each.log_probability == pytest.approx(float(expected.max()), abs=1e-3)
        prompt = [*prompt, each.id]
