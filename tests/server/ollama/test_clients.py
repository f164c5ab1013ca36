"""Ollama's own client, talking to the server."""

import pytest

from spalm.generation import Model, Sampling
from spalm.server import Limits
from support.generation import generated
from support.servers import in_thread, server_of

PROMPT = "ka1 lo2 mi3 .\nka1 lo2"
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def address(attached):
    with in_thread(server_of(attached, limits=Limits(max_tokens=40))) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    ollama = pytest.importorskip("ollama")
    return ollama.Client(host=address)


def written(model: Model, prompt: str, count: int) -> str:
    answer = generated(model, model.tokeniser.prompt(prompt), Sampling(max_tokens=count))
    return "".join(each.text for each in answer)


def test_it_lists_and_shows_the_model(client):
    assert [model.model for model in client.list().models] == ["tiny:latest"]
    assert [model.model for model in client.ps().models] == ["tiny:latest"]
    assert client.show("tiny").modelinfo["spalm.context_length"] > 0


def test_it_generates_as_a_chat_or_as_it_is(client, model):
    chat = client.generate("tiny", PROMPT, options=GREEDY)
    assert chat.response == written(model, f"<user> {PROMPT}\n<assistant>", 8)
    assert (chat.done, chat.done_reason, chat.eval_count) == (True, "length", 8)
    assert chat.prompt_eval_count > 0
    raw = client.generate("tiny:latest", PROMPT, raw=True, options=GREEDY)
    assert raw.response == written(model, PROMPT, 8)
    with_system = client.generate("tiny", PROMPT, system="be brief", options=GREEDY)
    assert with_system.response == written(model, f"<system> be brief\n<user> {PROMPT}\n<assistant>", 8)


def test_it_streams(client):
    whole = client.generate("tiny", PROMPT, raw=True, options=GREEDY)
    parts = list(client.generate("tiny", PROMPT, raw=True, options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 8


def test_it_chats(client, model):
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat("tiny", messages, options=GREEDY)
    assert whole.message.content == written(model, f"<user> {PROMPT}\n<assistant>", 8)
    parts = list(client.chat("tiny", messages, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    sampled = client.chat("tiny", messages, options={"seed": 1, "stop": ["."]})
    assert "." not in sampled.message.content
    assert sampled.eval_count <= 40, "without num_predict there is the server's limit"


def test_loading_a_model_is_an_empty_request(client):
    assert client.generate("tiny").done
    assert client.chat("tiny", []).done


def test_embeddings_are_normalised_and_alike_for_texts_that_are(client, address):
    found = client.embed("tiny", ["ka1 lo2 mi3", "ka1 lo2 mi3", "zz9 yy8"]).embeddings
    assert sum(value * value for value in found[0]) == pytest.approx(1)
    assert found[0] == found[1] != found[2]
    assert client.embeddings("tiny", "ka1 lo2 mi3").embedding == pytest.approx(found[0])
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as other:
        answer = other.embeddings.create(model="tiny", input=["ka1 lo2 mi3", ""])
    assert answer.data[0].embedding == pytest.approx(found[0], abs=1e-6)
    assert set(answer.data[1].embedding) == {0.0}
    assert answer.usage.total_tokens > 0


def test_errors_are_told(client):
    ollama = pytest.importorskip("ollama")
    for call, status in (
        (lambda: client.generate("other", PROMPT), 404),
        (lambda: client.generate("tiny", PROMPT, options={"num_predict": 10**6}), 400),
        (lambda: client.generate("tiny", PROMPT, format="json"), 422),
        (lambda: client.chat("tiny", [{"role": "user", "content": "x", "images": [b"abc"]}]), 422),
    ):
        with pytest.raises(ollama.ResponseError) as error:
            call()
        assert error.value.status_code == status
        assert error.value.error
