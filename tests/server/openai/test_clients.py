"""Programs that others wrote, talking to the server: OpenAI's client and lm-evaluation-harness. Nothing is fetched."""

import threading

import pytest
import torch

from spalm.generation import Decoder, Model, Sampling
from spalm.server import Limits
from support.generation import generated
from support.servers import Held, in_thread, server_of, wait_until

PROMPT = "ka1 lo2 mi3 .\nka1 lo2"
KEY = "a key"


@pytest.fixture(scope="module")
def address(attached):
    with in_thread(server_of(attached, key=KEY)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as found:
        yield found


def written(model: Model, prompt: str, count: int) -> str:
    answer = generated(model, model.tokeniser.prompt(prompt), Sampling(max_tokens=count))
    return "".join(each.text for each in answer)


def test_the_openai_client_completes(client, model):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "spalm"
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    found = client.completions.create(**asked)
    assert found.choices[0].text == written(model, PROMPT, 8)
    assert found.usage.completion_tokens == len(found.choices[0].logprobs.tokens) == 8
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == found.choices[0].text
    assert chunks[-1].usage == found.usage
    own = client.completions.create(**asked, extra_body={"cite": True, "memory": False})
    assert own.choices[0].citations == []


def test_the_openai_client_chats(client, model):
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 8, "temperature": 0}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert found.choices[0].message.content == written(model, f"<user> {PROMPT}\n<assistant>", 8)
    assert len(found.choices[0].logprobs.content) == 8
    chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert chunks[0].role == "assistant"
    assert "".join(chunk.content or "" for chunk in chunks) == found.choices[0].message.content


def test_the_openai_client_knows_the_errors(client, address, attached):
    import openai

    for error, more in (
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"max_tokens": 10_000}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"temperature": -1, "stream": True}),
    ):
        with pytest.raises(error) as caught:
            client.completions.create(**{"model": "tiny", "prompt": PROMPT, **more})
        assert caught.value.body["message"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()
    held = Held()
    app = server_of(attached, held, limits=Limits(waiting=1))
    with in_thread(app) as busy, openai.OpenAI(base_url=f"{busy}/v1", api_key=KEY, max_retries=0) as turned_away:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
        first = threading.Thread(target=lambda: turned_away.completions.create(**asked))
        first.start()
        wait_until(lambda: app.state.queue.size)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError):
                turned_away.completions.create(**asked, stream=stream)
        held.let_go()
        first.join(60)
        patient = turned_away.with_options(max_retries=5)  # as it is by default: it tries again
        assert patient.completions.create(**asked).choices[0].text


def log_probability(model: Model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """What a continuation gets, position by position, and whether it is what the model would say."""
    tokens = context + continuation
    decoder = Decoder(model)
    encoded = decoder.feed(tokens)
    total, greedy = 0.0, True
    for place in range(len(tokens) - 1):
        said = decoder.predict(encoded[place : place + 1], tokens[place])[0].log_probabilities[0]
        if place + 1 >= len(context):
            total += float(said[tokens[place + 1]])
            greedy &= int(said.argmax()) == tokens[place + 1]
    return total, greedy


@pytest.fixture(scope="module")
def harness(address, attached):
    pytest.importorskip("lm_eval")
    with pytest.MonkeyPatch.context() as environment:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            environment.setenv(name, "1")
        environment.setenv("OPENAI_API_KEY", KEY)
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        yield LocalCompletionsAPI(
            base_url=f"{address}/v1/completions",
            model="tiny",
            tokenizer=str(attached.directory),
            tokenizer_backend="huggingface",
            max_length=128,
            batch_size=3,
        )


def instances(kind: str, *arguments: tuple) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_the_harness_scores_continuations(harness, model):
    said = written(model, PROMPT, 3)
    asked = [(PROMPT, said), (PROMPT, " nu4 ."), ("nu1 nu2", " nu3 .\nlo5"), ("", "ka1 lo2"), ("mi3", " .")]
    found = harness.loglikelihood(instances("loglikelihood", *asked))
    encode = lambda text: model.tokeniser.encode([text.encode()])[0].tolist()  # noqa: E731
    for (context, continuation), (value, greedy) in zip(asked, found):
        before = encode(context) or [model.tokeniser.start]
        rest = encode(context + continuation)[len(encode(context)) :]
        expected, likeliest = log_probability(model, before, rest)
        assert value == pytest.approx(expected, abs=1e-3), continuation
        assert greedy == likeliest
    assert found[0][1]


def test_the_harness_scores_whole_texts(harness, model):
    text = "ka1 lo2 mi3 .\nnu4 nu5 ka6 .\n"
    (found,) = harness.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    tokens = model.tokeniser.encode([text.encode()])[0].tolist()
    assert found == pytest.approx(log_probability(model, [model.tokeniser.start], tokens)[0], abs=1e-3)


def test_the_harness_generates(harness, model):
    wanted = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
    found = harness.generate_until(instances("generate_until", (PROMPT, wanted), ("nu1 nu2", wanted)))
    assert found == [written(model, prompt, 12).partition("\n")[0] for prompt in (PROMPT, "nu1 nu2")]
    assert torch.is_inference_mode_enabled() is False
