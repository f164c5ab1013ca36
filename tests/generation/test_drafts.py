"""Drafts from the memory: what is generated does not change, and they are made only where they pay."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import spalm
from spalm.generation import CitedSource, GeneratedToken, GenerationOptions, Model, Sampling, generate_tokens
from spalm.generation.citations import FollowedPlace, citations_of, continuation
from spalm.generation.decoding.drafts import KINDS, LONGEST_DRAFT, CheckedDraft, Drafter, DraftRecord, kind_of
from spalm.generation.decoding.generate import Generation, Step, advance, note_times
from spalm.generation.decoding.pass_times import PassTimes
from spalm.generation.memories import MemorySelection
from spalm.memory import MISSING
from spalm.semiparametric import CombinedPrediction, Retrieved

CPU = spalm.Execution(spalm.Hardware("cpu", 1))


def times_of(seconds: Callable[[int], float]) -> PassTimes:
    """Times of passes that were measured often."""
    found = PassTimes()
    for tokens in 20 * list(range(1, 14)):
        found.note(tokens, seconds(tokens))
    return found


def cost(times: PassTimes, tokens: int) -> float:
    """Returns the time of a pass over some tokens, in passes over one."""
    one, several = times.seconds(np.array([1, tokens]))
    return float(several / one)


@pytest.fixture
def model(attached_folder) -> Model:
    return spalm.load(attached_folder, execution=CPU)


@pytest.fixture
def prompts(model) -> list[list[int]]:
    """Beginnings of documents that the memory holds, where it knows what follows."""
    train = model.models.corpus.split("train")
    start = model.tokeniser.start
    return [[start, *train.tokens[begin : begin + 12].tolist()] for begin in train.begins[:4]]


def generate(model: Model, prompt: list[int], sampling: Sampling, *, draft: bool) -> list[GeneratedToken]:
    options = GenerationOptions(sampling, cite=True, likely=2, draft=draft)
    return list(generate_tokens(model.decoder(), prompt, options))


def eager(model: Model) -> Model:
    """The model, certain that long drafts pay."""
    model.__dict__["pass_times"] = times_of(lambda _: 1.0)
    model.pass_times.note = lambda *_: None
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_changes_no_token(model, prompts, temperature):
    sampling = Sampling(max_tokens=30, temperature=temperature, seed=3)
    plain = [generate(model, prompt, sampling, draft=False) for prompt in prompts]
    drafted = [generate(eager(model), prompt, sampling, draft=True) for prompt in prompts]
    assert model.draft_record.right.sum() > DraftRecord().right.sum() + 10, "drafts were tried and were right"
    for one, other in zip(plain, drafted):
        assert [token.id for token in one] == [token.id for token in other]
        assert [token.text for token in one] == [token.text for token in other]
        assert [token.finish_reason for token in one] == [token.finish_reason for token in other]
        found, expected = ([token.log_probability for token in each] for each in (other, one))
        np.testing.assert_allclose(found, expected, atol=1e-3)
        assert [token.sources[:1] and token.sources[0].document for token in one] == [
            token.sources[:1] and token.sources[0].document for token in other
        ]


def test_drafts_save_passes(model, prompts, monkeypatch):
    read, passes = model.network.read, []
    monkeypatch.setattr(model.network, "read", lambda *given: (passes.append(1), read(*given))[1])
    counts = []
    for draft in (False, True):
        passes.clear()
        assert len(generate(eager(model), prompts[0], Sampling(max_tokens=30), draft=draft)) == 30
        counts.append(len(passes))
    assert counts[1] < 0.7 * counts[0]


@dataclass
class RememberedDecoder:
    """Predicts as a decoder of the model does, and computes what follows each beginning only once."""

    model: Model
    known: dict[tuple[int, ...], tuple[CombinedPrediction, Retrieved]]
    tokens: list[int] = field(default_factory=list)
    at_once, can_shorten = 2, True

    @property
    def memories(self) -> MemorySelection:
        return self.model.models.memories.select()

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def feed_together(decoders, pieces, needed):
        (decoder,), (piece,), (count,) = decoders, pieces, needed
        decoder.tokens += piece
        end = len(decoder.tokens)
        return [[tuple(decoder.tokens[:stop]) for stop in range(end - count + 1, end + 1)]]

    def take_back(self, tokens: int) -> None:
        del self.tokens[len(self.tokens) - tokens :]

    def after(self, beginning: tuple[int, ...]) -> tuple[CombinedPrediction, Retrieved]:
        if beginning not in self.known:
            decoder = self.model.decoder()
            encoded = decoder.feed(beginning)[-1:]
            self.known[beginning] = decoder.predict(encoded, beginning[-1])
        return self.known[beginning]


def predict_remembered(texts):
    """Takes the place of `predict_together`."""
    ((decoder, beginnings, _),) = texts
    found = [decoder.after(beginning) for beginning in beginnings]
    if len(found) == 1:
        return found
    combined, retrieved = ([each[number] for each in found] for number in (0, 1))
    return [(Rows(combined), Rows(retrieved))]


class Rows(list):
    """Predictions of several positions, of which one is taken at a time."""

    @property
    def log_probabilities(self) -> list:
        return list(self)

    def __getitem__(self, rows: slice):
        (row,) = super().__getitem__(rows)
        return row


def left_by(sampling: Sampling, log_probabilities: torch.Tensor) -> dict[int, float]:
    """The distribution of the next token, by the definitions of temperature, top_k and top_p."""
    weights = np.exp(log_probabilities.double().numpy() / sampling.temperature)
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: sampling.top_k]
    total = sum(weights[token] for token in order)
    kept, reached = {}, 0.0
    for token in order:
        if reached < sampling.top_p:
            kept[token] = weights[token]
            reached += weights[token] / total
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=3, temperature=1.0, top_k=4), Sampling(max_tokens=3, temperature=1.6, top_p=0.9, top_k=6)],
)
def test_samples_with_drafts_have_the_distribution_of_the_model(model, prompts, sampling, monkeypatch):
    """The first three tokens of many answers, drafted or not, have exactly the model's probabilities (chi-square)."""
    monkeypatch.setattr("spalm.generation.decoding.generate.predict_together", predict_remembered)
    eager(model).__dict__["draft_record"] = record = DraftRecord()
    checked = []
    monkeypatch.setattr(record, "note", lambda drafts, *_: checked.extend(drafts))
    known, seen, count = {}, Counter(), 2000
    for seed in range(count):
        options = GenerationOptions(sampling.model_copy(update={"seed": seed}), draft=True)
        answer = generate_tokens(RememberedDecoder(model, known), prompts[1], options)
        seen[tuple(token.id for token in answer)] += 1
    right, wrong = sum(each.right > 0 for each in checked), sum(each.right < each.tokens for each in checked)
    assert min(right, wrong) > 100, "drafts were accepted and rejected"
    after = RememberedDecoder(model, known).after
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*text, token): before * share
            for text, before in expected.items()
            if model.tokeniser.end_tokens.isdisjoint(text)
            for token, share in left_by(sampling, after((*prompts[1], *text))[0].log_probabilities[0]).items()
        } | {text: before for text, before in expected.items() if not model.tokeniser.end_tokens.isdisjoint(text)}
    assert set(seen) <= set(expected), "nothing is picked that has no probability"
    often = {text: share for text, share in expected.items() if share * count >= 5}
    observed = [*(seen[text] for text in often), sum(seen[text] for text in expected if text not in often)]
    shares = [*often.values(), 1 - sum(often.values())]
    if shares[-1] * count < 1:
        observed, shares = observed[:-1], shares[:-1]
    assert len(often) > 10
    p = chisquare(observed, np.array(shares) / sum(shares) * sum(observed)).pvalue
    assert p > 1e-3


def test_several_answers_advance_together_as_each_would_alone(model, prompts):
    sampling = Sampling(max_tokens=12)
    alone = [[token.id for token in generate(model, prompt, sampling, draft=False)] for prompt in prompts]
    options = GenerationOptions(sampling, draft=True)
    answers = [Generation(model.decoder(), prompt, options) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    while running := [number for number, answer in enumerate(answers) if not answer.finished]:
        for number, step in zip(running, advance([answers[number] for number in running], longest=5)):
            found[number] += [token.id for token in step.picked]
    assert found == alone


def test_texts_with_and_without_the_memory_advance_together(model, prompts):
    options = GenerationOptions(Sampling(max_tokens=5))
    answers = [Generation(model.decoder(use_memory=use_memory), prompts[0], options) for use_memory in (True, False)]
    first, second = (step.picked[0] for step in advance(answers))
    assert first.memory_share > 0 == second.memory_share


def prediction(ids: list[int], tokens: list[int], weights: list[float]) -> tuple[CombinedPrediction, Retrieved]:
    scores = torch.full((1, 50), 0.02).log()
    retrieved = Retrieved(torch.tensor([tokens]), torch.ones(1, len(ids)), torch.tensor([ids]))
    return CombinedPrediction(scores, torch.tensor([0.98]), torch.tensor([weights])), retrieved


def test_a_draft_follows_the_strongest_proposal_of_the_token(model):
    entries = model.store.entries()
    first, second = (int(entries.live_documents.first_ids[number]) for number in (0, 1))
    drafter = Drafter(model.store, times_of(lambda _: 1.0), DraftRecord())
    for chosen, weights in ((first, [0.9, 0.1]), (second, [0.1, 0.9])):
        place = FollowedPlace()
        place.advance(entries, *prediction([first, second], [7, 7], weights), token=7)
        found = drafter.propose(place, 1.0, LONGEST_DRAFT).tokens
        assert found == entries.tokens_of(np.arange(chosen + 1, chosen + 1 + len(found))).tolist()
        assert len(drafter.propose(place, 1.0, 2).tokens) == 2 < len(found)
    place = FollowedPlace()
    place.advance(entries, *prediction([first], [7], [1.0]), token=8)
    assert drafter.propose(place, 1.0, LONGEST_DRAFT).tokens == [], "nothing proposed it"


def test_a_place_is_followed_as_long_as_its_document_goes_on_so(model):
    entries = model.store.entries()
    first, other = (int(entries.live_documents.first_ids[number]) for number in (0, 1))
    token, following = entries.tokens_of(np.array([first, first + 1])).tolist()
    place = FollowedPlace()
    place.advance(entries, *prediction([first], [token], [1.0]), token=token)
    assert (place.entry, place.length) == (first, 1)
    assert place.advance(entries, *prediction([first + 1], [following], [1.0]), token=following) == first + 1
    assert (place.entry, place.length, place.agreement) == (first + 1, 2, 1.0)
    third = place.expected
    assert third == entries.tokens_of(np.array([first + 2]))[0]
    # Another place goes on otherwise, and is proposed more strongly: the token still stands where the answer was.
    other = next(
        id
        for id in range(other, other + 1000)
        if place_after(entries, id) not in (MISSING, place_after(entries, first + 2))
    )
    followed = place.advance(entries, *prediction([first + 2, other], [third, third], [0.25, 0.75]), token=third)
    assert followed == first + 2
    assert (place.entry, place.length, place.agreement) == (other, 1, 0.75)
    assert place.advance(entries, *prediction([first], [token], [1.0]), token=MISSING) == MISSING


def place_after(entries, id: int) -> int:
    return (continuation(entries, id, 1) or [MISSING])[0]


def test_a_draft_ends_with_its_document(model):
    documents = model.store.entries().live_documents
    last = int(documents.first_ids[0] + documents.entries[0]) - 1
    assert continuation(model.store.entries(), last, 5) == []
    assert len(continuation(model.store.entries(), last - 2, 5)) == 2
    assert continuation(model.store.entries(), 10**9, 5) == [], "it was forgotten"


def test_drafts_are_as_long_as_pays():
    record = DraftRecord()
    cheap, dear = times_of(lambda tokens: 1 + 0.02 * tokens), times_of(lambda tokens: 0.1 + 0.9 * tokens)
    memory = None
    assert Drafter(memory, cheap, record).length_that_pays(0) > 2
    assert Drafter(memory, dear, record).length_that_pays(0) == 0
    for _ in range(50):
        record.note([CheckedDraft(0, 3, 0)], 0.0, 1.0)
    assert Drafter(memory, cheap, record).length_that_pays(0) <= 1
    sure = replace(DraftRecord(), right=np.full(KINDS, 99.0), tried=np.full(KINDS, 100.0))
    assert Drafter(memory, cheap, sure).length_that_pays(0) == LONGEST_DRAFT


def test_beside_others_a_draft_pays_less():
    """Each token of a pass costs half of what the pass itself does."""
    times, sure = (
        times_of(lambda tokens: 2.0 + tokens),
        replace(DraftRecord(), right=np.full(KINDS, 80.0), tried=np.full(KINDS, 100.0)),
    )
    alone = Drafter(None, times, sure).length_that_pays(0)
    times.others = 15
    assert Drafter(None, times, sure).length_that_pays(0) < alone


def test_noise_of_long_passes_does_not_make_drafts_cheap():
    """Passes of eight answers with drafts take 25 + 7 ms a token, with noise; all but the control have drafts."""
    random = np.random.default_rng(0)
    times = PassTimes()
    for number in range(300):
        tokens = 8 if times.next_is_control else int(random.integers(20, 60))
        waiting = 10 if number % 50 == 0 else random.uniform(0.8, 1.6)
        times.note(tokens, (0.025 + 0.007 * tokens) * waiting)
    times.others = 7
    likely = replace(DraftRecord(), right=np.full(KINDS, 60.0), tried=np.full(KINDS, 100.0))
    assert Drafter(None, times, likely).length_that_pays(0) == 0


def test_times_of_passes_are_a_line_that_follows_the_machine():
    times = PassTimes()
    assert cost(times, 5) > 1
    times.note(1, 100.0)  # something is compiled
    times.note(8, 2.0)
    assert cost(times, 8) > 1, "one number of tokens tells nothing of the others: the assumed cost counts"
    times = times_of(lambda tokens: 1.5 + 0.5 * tokens)
    assert cost(times, 3) == pytest.approx(1.5, rel=0.02)
    assert cost(times, 9) == pytest.approx(3.0, rel=0.02)
    assert cost(times, 1000) == pytest.approx(501.5 / 2, rel=0.05)
    jump = times_of(lambda tokens: 1.0 if tokens == 1 else 1.5 + 0.5 * tokens)
    assert cost(jump, 2) > 1.9, "what was seen corrects the line, by which it is 1.4"
    control = [number for number in range(64) if (times.next_is_control, times.note(1, 2.0))[0]]
    assert np.diff(control).tolist() == [16] * (len(control) - 1), "now and then a pass is made without drafts"
    for _ in range(200):
        times.note(1, 1.0)
        times.note(5, 1.0)
    assert cost(times, 9) == pytest.approx(1.0, abs=0.05)


# What drafts cost and save


def test_a_kind_that_loses_pauses_longer_each_time_and_one_that_wins_goes_on():
    record = DraftRecord()
    pauses = []
    for _ in range(3):
        for _ in range(3):
            record.note([CheckedDraft(2, 4, 1), CheckedDraft(5, 4, 4)], added=2.0, saved=0.5)
        chances = 0
        while record.passes_over(2):
            chances += 1
        pauses.append(chances)
        assert not record.passes_over(5), "each of the two added a second; this one saved two"
    assert pauses == [16, 32, 64]
    for _ in range(3):
        record.note([CheckedDraft(2, 4, 4)], added=1.0, saved=0.5)
    for _ in range(9):
        record.note([CheckedDraft(2, 4, 0)], added=1.0, saved=0.5)
        if record.pauses[2, 0]:
            break
    assert record.pauses[2, 0] == 16, "a kind that has won begins again with a short pause"


def test_a_kind_that_pauses_is_not_drafted(model):
    record, entries = DraftRecord(), model.store.entries()
    first = int(entries.live_documents.first_ids[0])
    place = FollowedPlace(first, 1, 1.0, place_after(entries, first))
    drafter = Drafter(model.store, times_of(lambda _: 1.0), record)
    assert drafter.propose(place, 1.0, 5).tokens
    record.pauses[kind_of(1.0, 1)] = 1
    assert not drafter.propose(place, 1.0, 5).tokens
    assert drafter.propose(place, 1.0, 5).tokens, "the pause is over"


def test_drafts_are_charged_with_the_time_that_they_add_to_a_pass(model):
    """A pass takes a second without drafts, for two answers; one that takes longer than thrice that waited."""
    model.__dict__["pass_times"] = times_of(lambda _: 1.0)
    steps = [Step(draft=CheckedDraft(1, 3, 2)), Step(draft=CheckedDraft(2, 1, 0))]
    for seconds, added in ((1.8, 0.8), (100.0, 2.0)):
        model.__dict__["draft_record"] = record = DraftRecord()
        note_times(model, steps, 6, seconds=seconds)
        np.testing.assert_allclose(record.balance[1], [1, 0.75 * added, 1.0], rtol=0.05)
        np.testing.assert_allclose(record.balance[2], [1, 0.25 * added, 0.0], rtol=0.05)
    other = times_of(lambda _: 1.0)
    other.note(6, 3.0)
    tokens = np.array([6])
    np.testing.assert_allclose(model.pass_times.seconds(tokens), other.seconds(tokens), rtol=0.2)


def test_without_the_memory_no_contexts_are_looked_up(model, prompts, monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr("spalm.generation.decoding.decoder.last_contexts", refuse)
    options = GenerationOptions(Sampling(max_tokens=3))
    assert list(generate_tokens(model.decoder(use_memory=False), prompts[0], options))
    with pytest.raises(AssertionError):
        list(generate_tokens(model.decoder(), prompts[0], options))


# Citations


def test_what_is_cited_does_not_depend_on_drafts(model, prompts):
    sampling = Sampling(max_tokens=30)
    plain = [generate(model, prompt, sampling, draft=False) for prompt in prompts]
    drafted = [generate(eager(model), prompt, sampling, draft=True) for prompt in prompts]
    assert sum(token.drafted for answer in drafted for token in answer) > 10
    assert not any(token.drafted for answer in plain for token in answer)
    for one, other in zip(plain, drafted):
        found, expected = citations_of(other), citations_of(one)
        assert [(each.span, each.document, each.offset) for each in found] == [
            (each.span, each.document, each.offset) for each in expected
        ]


def test_an_accepted_draft_is_one_citation_with_its_place():
    def token(text: str, share: float, offset: int, *, continues: bool = True) -> GeneratedToken:
        sources = [CitedSource("a", offset, 0.1), CitedSource("b", 50, 0.8)]
        return GeneratedToken(0, text, 0.0, share, sources, continues=continues, drafted=continues)

    drafted = [
        token("one ", 0.9, 7, continues=False),
        token("two ", 0.3, 8),
        token("three ", 0.2, 9),
        token("x", 0.05, 10),
    ]
    (found,) = citations_of(drafted)
    assert (found.span, found.document, found.offset) == ((0, 14), "a", 7)
    separate = [replace(each, continues=False) for each in drafted]
    assert [(each.span, each.document) for each in citations_of(separate)] == [((0, 4), "b")]
    assert citations_of(drafted[1:]) == [], "the memory decided no token"
