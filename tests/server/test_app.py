"""The server of a model with a memory, from outside: completions, chat, and what else it answers."""

import json

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from spalm.generation import Decoder, Model, Sampling
from spalm.server import Limits
from support.generation import generated
from support.servers import Scripted, client_of, server_of

PROMPT = "ka1 lo2 mi3 .\nka1 lo2"


@pytest.fixture(scope="module")
def client(attached) -> TestClient:
    return client_of(server_of(attached, limits=Limits(body_bytes=1 << 16, max_tokens=100)))


def complete(client: TestClient, **asked) -> dict:
    found = client.post("/v1/completions", json={"temperature": 0, **asked})
    assert found.status_code == 200, found.text
    return found.json()


def streamed(client: TestClient, path: str = "/v1/completions", **asked) -> list[dict]:
    found = client.post(path, json={"temperature": 0, "stream": True, **asked})
    assert found.status_code == 200, found.text
    assert found.headers["content-type"].startswith("text/event-stream")
    *events, done, nothing = found.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def one_by_one(model: Model, tokens: list[int], use_memory: bool = True) -> torch.Tensor:
    """log p of all tokens after each of `tokens`, predicted alone."""
    decoder = Decoder(model, use_memory=use_memory)
    encoded = decoder.feed(tokens)
    rows = range(len(tokens))
    return torch.cat([decoder.predict(encoded[row : row + 1], tokens[row])[0].log_probabilities for row in rows])


def test_an_answer_is_what_the_model_writes(client, model):
    tokens = model.tokeniser.prompt(PROMPT)
    written = list(generated(model, tokens, Sampling(max_tokens=9)))
    found = complete(client, prompt=PROMPT, max_tokens=9, model="tiny")
    assert (found["object"], found["model"]) == ("text_completion", "tiny")
    (choice,) = found["choices"]
    assert choice["text"] == model.tokeniser.decode([each.id for each in written])
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert found["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": 9,
        "total_tokens": len(tokens) + 9,
    }


@pytest.mark.parametrize("use_memory", [True, False])
def test_log_probabilities_of_prompt_and_answer(client, model, use_memory):
    length = 4 if use_memory else 0  # this model by itself talks nonsense, which reads otherwise when it is read again
    asked = {"prompt": PROMPT, "max_tokens": length, "echo": True, "logprobs": 3, "memory": use_memory}
    (choice,) = complete(client, **asked)["choices"]
    said = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(said["tokens"]) == choice["text"]
    begins = np.cumsum([0, *map(len, said["tokens"])])[:-1]
    assert said["text_offset"] == begins.tolist()
    tokens = model.tokeniser.encode([choice["text"].encode()])[0].tolist()
    assert [model.tokeniser.spell(token) for token in tokens] == said["tokens"]
    expected = one_by_one(model, tokens, use_memory)
    assert said["token_logprobs"][0] is said["top_logprobs"][0] is None
    came = expected[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert said["token_logprobs"][1:] == pytest.approx(came.tolist(), abs=1e-4)
    for row, (likely, own) in enumerate(zip(said["top_logprobs"][1:], said["tokens"][1:])):
        best = expected[row].topk(3)
        names = [model.tokeniser.spell(token) for token in best.indices.tolist()]
        assert set(likely) == {*names, own}
        assert [likely[name] for name in names] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompts_of_every_kind(client, model):
    tokens = model.tokeniser.prompt(PROMPT)
    other = model.tokeniser.prompt("nu1")
    texts = [each["text"] for each in complete(client, prompt=[PROMPT, "nu1"], max_tokens=5)["choices"]]
    assert texts == [each["text"] for each in complete(client, prompt=[tokens, other], max_tokens=5)["choices"]]
    assert complete(client, prompt=tokens, max_tokens=5)["choices"][0]["text"] == texts[0]
    assert complete(client, prompt=[], max_tokens=2)["usage"]["prompt_tokens"] == 1
    nothing = complete(client, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert (nothing["text"], nothing["finish_reason"]) == (PROMPT, "length")
    assert len(nothing["logprobs"]["tokens"]) == len(tokens)
    assert complete(client, prompt="nu1")["usage"]["completion_tokens"] == 16


@pytest.mark.slow
def test_chance_can_be_repeated(client):
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3}
    first, again = (complete(client, **asked)["choices"] for _ in range(2))
    assert [each["text"] for each in first] == [each["text"] for each in again]
    assert len({each["text"] for each in first}) == 3
    assert [each["index"] for each in first] == [0, 1, 2]
    greedy = complete(client, prompt=PROMPT, max_tokens=12)["choices"][0]["text"]
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-300}):
        assert complete(client, **{**asked, **narrow, "n": 1})["choices"][0]["text"] == greedy


def test_streams_say_the_same(client):
    asked = {"prompt": [PROMPT, "nu1 nu2"], "max_tokens": 11, "echo": True, "logprobs": 2, "stop": ["\nka", "zz"]}
    whole = complete(client, **asked, cite=True)
    *chunks, last = streamed(client, **asked, cite=True, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        for found, expected in zip(parts[-1]["citations"], choice["citations"], strict=True):
            assert (found["start"], found["end"]) == (expected["start"], expected["end"])
            assert [each["document"] for each in found["sources"]] == [each["document"] for each in expected["sources"]]
        for name, values in choice["logprobs"].items():
            values_of_parts = [value for part in parts for value in part["logprobs"][name]]
            if name in ("tokens", "text_offset"):
                assert values_of_parts == values
            elif name == "token_logprobs":
                assert values_of_parts == pytest.approx(values, abs=1e-4)
    assert len({chunk["id"] for chunk in chunks}) == 1


def told(attached, *tokens: int) -> TestClient:
    return client_of(server_of(attached, Scripted(list(tokens))))


def test_why_an_answer_ended(attached, model):
    """The end may come with the very last token that was allowed."""
    one, two = model.tokeniser.encode([b"ka"])[0][0], model.tokeniser.encode([b" lo"])[0][0]
    (end,) = model.tokeniser.end_tokens
    for limit, reason, written in [(2, "length", 2), (3, "stop", 3), (4, "stop", 3)]:
        found = complete(told(attached, one, two, end), prompt="nu1", max_tokens=limit, logprobs=1)
        assert found["choices"][0]["text"] == "ka lo"
        assert found["choices"][0]["finish_reason"] == reason
        assert found["usage"]["completion_tokens"] == written
        # The token that ended it is told too: lm-evaluation-harness counts on one token being written.
        assert found["choices"][0]["logprobs"]["text_offset"] == [0, 2, 5][:written]


def test_stops_cut_text_and_tokens_alike(attached, model):
    def ids(text: str) -> list[int]:
        return model.tokeniser.encode([text.encode()])[0].tolist()

    script = [ids("ka")[0], ids("1")[0], ids(" lo")[0], *ids("é"), ids("\n")[0]]
    assert len(ids("é")) == 2
    for stop, text, tokens, written in [
        ("1 l", "ka", ["ka"], 3),
        ("a1", "k", ["ka"], 2),
        ("é", "ka1 lo", ["ka", "1", " lo"], 5),
        ("o\u00e9\n", "ka1 l", ["ka", "1", " lo"], 6),
        ("lox", "ka1 loé\n", None, 6),
        ("ka", "", [], 1),
    ]:
        asked = {"prompt": "nu1", "max_tokens": 6, "stop": [stop], "logprobs": 0}
        found = complete(told(attached, *script), **asked)
        choice = found["choices"][0]
        assert choice["text"] == text, stop
        assert choice["finish_reason"] == ("length" if tokens is None else "stop")
        assert found["usage"]["completion_tokens"] == written
        if tokens is not None:
            assert choice["logprobs"]["tokens"] == tokens
        chunks = [chunk["choices"][0] for chunk in streamed(told(attached, *script), **asked)]
        assert "".join(chunk["text"] for chunk in chunks) == text
        assert [token for chunk in chunks for token in chunk["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_what_the_memory_decided_is_cited(client, model):
    (choice,) = complete(client, prompt=PROMPT, max_tokens=20, cite=True)["choices"]
    names = model.store.entries().live_documents.names
    assert choice["citations"]
    for span in choice["citations"]:
        assert 0 <= span["start"] < span["end"] <= len(choice["text"])
        assert {source["document"] for source in span["sources"]} <= set(names)
    (alone,) = complete(client, prompt=PROMPT, max_tokens=20, cite=True, memory=False)["choices"]
    assert alone["citations"] == []


def test_a_conversation(client, model):
    messages = [
        {"role": "system", "content": "ka1"},
        {"role": "user", "content": [{"type": "text", "text": "lo2 "}, {"type": "text", "text": "mi3"}]},
    ]
    said = "<system> ka1\n<user> lo2 mi3\n<assistant>"
    plain = complete(client, prompt=said, max_tokens=7)
    asked = {"messages": messages, "max_tokens": 7, "logprobs": True, "top_logprobs": 2}
    found = client.post("/v1/chat/completions", json={"temperature": 0, **asked}).json()
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": plain["choices"][0]["text"], "refusal": None}
    assert found["usage"] == plain["usage"]
    for token in choice["logprobs"]["content"]:
        assert token["bytes"] == list(token["token"].encode())
        assert max(each["logprob"] for each in token["top_logprobs"]) == token["logprob"]
    first, *chunks = streamed(client, "/v1/chat/completions", **asked)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["object"] == "chat.completion.chunk"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    room = client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0}).json()
    assert room["usage"]["total_tokens"] <= model.max_length


def test_models_health_and_metrics(client, model):
    models = client.get("/v1/models").json()
    assert [each["id"] for each in models["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json() == models["data"][0]
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health").json() == {"status": "ok", "model": "tiny", "entries": len(model.store.entries())}

    def measured() -> dict[str, float]:
        lines = client.get("/metrics").text.splitlines()
        named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert {name.partition("{")[0] for name in found} == named
        return {name: float(value) for name, value in found.items()}

    before = measured()
    complete(client, prompt=PROMPT, max_tokens=5)
    client.get("/../../secret")
    after = measured()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["spalm_tokens_written_total"] == grown["spalm_searches_total"] == 5
    assert grown["spalm_tokens_read_total"] == len(model.tokeniser.prompt(PROMPT))
    assert grown['spalm_requests_total{method="POST",route="/v1/completions",status="200"}'] == 1
    assert not any("secret" in name for name in after)
    assert after["spalm_documents"] == 30


def test_the_explorers_page_is_there(client):
    assert "default-src 'none'" in client.get("/").headers["content-security-policy"]
    assert client.post("/api/passage", json={"text": "ka1 lo2"}).json()["models"].keys() == {
        "plain",
        "knn-lm",
        "adaptive",
    }
    assert client.post("/api/passage", json={}).json() == {"error": "give either a text or a place in the corpus"}
