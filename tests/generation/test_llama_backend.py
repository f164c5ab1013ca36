"""A real model with a memory, run by llama.cpp: the text is the same with drafts, and beside other answers.

llama.cpp computes passes over many tokens in another way than short ones, so the logits depend on the pieces in which a
prompt is read. What is promised is this: texts are equal up to a place where rounding decided between the two likeliest
tokens. A draft is short, and changes next to nothing.
"""

from functools import partial
from itertools import pairwise

import pytest

import spalm
from spalm.compute import available_cores
from spalm.generation import AnswerBatch, AnswerRequest, GeneratedToken, GenerationOptions, Model, Sampling
from spalm.generation.decoding.drafts import PassTimes
from support.small_texts import python_file

pytestmark = pytest.mark.slow
pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install 'spalm[llama]'")
SLOTS, TOKENS = 4, 48
PROMPTS = [python_file("bisect")[:60], python_file("heapq")[:90], "The capital of France is", "import queue\n\ndef"]
CLOSE, ROUNDING = 0.05, 0.5
"""Differences of log-probabilities after the same pieces of the prompt, and after others: 0 and 0.14 were seen."""


@pytest.fixture(scope="module")
def model(smollm2_attached) -> Model:
    hardware = spalm.Hardware("cpu", available_cores(), backend="llama")
    model = spalm.load(smollm2_attached, execution=spalm.Execution(hardware))
    model.network.reserve(SLOTS)
    return model


def request(model: Model, prompt: str, tokens: int = TOKENS, *, draft: bool = False) -> AnswerRequest:
    options = GenerationOptions(Sampling(max_tokens=tokens), likely=2, draft=draft)
    return AnswerRequest(model.tokeniser.prompt(prompt), options)


def finish(batch: AnswerBatch) -> dict[int, list[GeneratedToken]]:
    """Returns the tokens of the running answers, by the number of the answer, counted from the first that runs."""
    numbers = {id(answer): number for number, answer in enumerate(batch.running)}
    found: dict[int, list[GeneratedToken]] = {number: [] for number in numbers.values()}
    while batch.running:
        for answer, chunks in batch.step():
            assert answer.error is None
            found[numbers[id(answer)]] += [token for chunk in chunks for token in chunk.tokens]
    return found


def answered(model: Model, prompt: str, **asked) -> list[GeneratedToken]:
    batch = AnswerBatch(model, SLOTS)
    batch.add(request(model, prompt, **asked))
    return finish(batch)[0]


def same_but_for(rounding: float, found: list[GeneratedToken], expected: list[GeneratedToken]) -> bool:
    """Whether two answers are the same up to the first place where rounding decided between two tokens."""
    for one, other in zip(found, expected):
        first, second = (score for _, score in other.likely)
        if one.id != other.id:
            return first - second < rounding
        if abs(one.log_probability - other.log_probability) > rounding:
            return False
    return len(found) == len(expected)


@pytest.fixture(scope="module")
def alone(model) -> list[list[GeneratedToken]]:
    """Answers, each generated alone and without drafts."""
    return [answered(model, prompt) for prompt in PROMPTS]


def test_the_comparison_notices_another_text(alone):
    assert same_but_for(CLOSE, alone[0], alone[0])
    assert not same_but_for(ROUNDING, alone[0], alone[1])
    assert not same_but_for(ROUNDING, alone[0][:-1], alone[0])


def test_drafts_change_no_token(model, alone, monkeypatch):
    times, passes = PassTimes(), []
    for tokens in 20 * list(range(1, 14)):
        times.note(tokens, 1.0)  # long drafts pay
    times.note = lambda *_: None
    monkeypatch.setitem(model.__dict__, "pass_times", times)
    read = model.network.read
    monkeypatch.setattr(model.network, "read", lambda *about: passes.append(1) or read(*about))
    found = [answered(model, prompt, draft=True) for prompt in PROMPTS]
    assert all(map(partial(same_but_for, CLOSE), found, alone))
    assert len(passes) < sum(map(len, found)) / 2


def test_answers_side_by_side_are_what_each_is_alone(model, alone):
    batch = AnswerBatch(model, SLOTS)
    for prompt in PROMPTS:
        batch.add(request(model, prompt))
    assert all(map(partial(same_but_for, ROUNDING), finish(batch).values(), alone))


def test_beginnings_of_prompts_are_read_once(model):
    """By conversations in turn, and by requests that arrive together; there are no more sequences than slots."""
    begins = [python_file(name)[:250] for name in ("heapq", "queue", "cmd")]
    together = [begins[0] + end for end in (" if", " while", " for", " def")]
    expected = {prompt: answered(model, prompt, tokens=3) for prompt in [*begins, *together]}
    whole = [len(model.tokeniser.prompt(text)) - 1 for text in begins]
    batch, reused = AnswerBatch(model, SLOTS), [0]
    for number in (0, 1, 0, 1, 2):
        batch.add(request(model, begins[number], 3))
        assert same_but_for(ROUNDING, finish(batch)[0], expected[begins[number]])
        reused.append(batch.reused_tokens)
    assert [later - earlier for earlier, later in pairwise(reused)] == [0, 0, whole[0], whole[1], 0]
    for prompt in together:
        batch.add(request(model, prompt, 3))
    for found, prompt in zip(finish(batch).values(), together, strict=True):
        assert same_but_for(ROUNDING, found, expected[prompt])
    assert batch.reused_tokens - reused[-1] >= 4 * (whole[0] - 1)
