"""Documents over HTTP: what is added is used at once, names are data, and the explorer explains what comes of them."""

import json
import math
from dataclasses import replace
from http.client import HTTPConnection
from urllib.parse import quote

import numpy as np
import pytest
from starlette.testclient import TestClient

from spalm.artifact import only_writer
from spalm.compute import Hardware
from spalm.generation import AttachedModels, Model, load_model
from spalm.generation.inspection import CorpusPassage, Explorer
from spalm.memory import Memory
from spalm.neighbours import IndexSettings, make_searcher
from spalm.semiparametric import Knn, KnnCombiner, PlainCombiner
from spalm.server import Limits, make_server
from support.servers import copied, in_thread, open_attached, server_of, with_combiner

PATH = "/memory/documents"
SECRET = "mi7 nu9 ka22 lo24 lo3 .\n" * 3
NAMES = [
    "../../etc/passwd",
    "..",
    ".",
    "/",
    "a/b//c",
    "näme 名",
    "a?b#c%2F%00",
    "x\ny",
    " ",
    "'; DROP TABLE documents;--",
]


@pytest.fixture
def folder(attached_folder, tmp_path):
    return copied(attached_folder, tmp_path / "tiny")


@pytest.fixture
def client(folder) -> TestClient:
    return client_of(server_of(open_attached(folder)))


def client_of(app) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def add(client, name: str, text: str = SECRET) -> int:
    return client.post(PATH, json={"name": name, "text": text}).status_code


def trusting(model: Model) -> Model:
    """Goes by the nearest: what a mixture learns on a random model is not to trust anything."""
    return with_combiner(model, KnnCombiner(PlainCombiner(), Knn(0.95, 0.5, 4)))


def names(client, **asked) -> list[str]:
    return [each["name"] for each in client.get(PATH, params=asked).json()["documents"]]


def secret_score(client) -> float:
    asked = {"prompt": SECRET, "max_tokens": 0, "echo": True, "logprobs": 0}
    return sum(client.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]["token_logprobs"][1:])


def test_what_is_added_is_used_at_once_and_what_is_deleted_no_more(folder):
    client = client_of(server_of(open_attached(folder), trusting))
    before, held = secret_score(client), client.get(PATH).json()
    added = client.post(PATH, json={"name": "secret", "text": SECRET})
    assert added.status_code == 201
    entries = added.json()["entries"]
    assert client.get(PATH).json()["entries"] == held["entries"] + entries
    assert client.get("/health").json()["entries"] == held["entries"] + entries
    assert secret_score(client) > before + entries / 4
    tokeniser = open_attached(folder).corpus.tokeniser
    beginning = [tokeniser.start, *tokeniser.encode([b"mi7 nu9 ka22"])[0].tolist()]
    asked = {"prompt": beginning, "max_tokens": 6, "temperature": 0, "cite": True}
    (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
    assert SECRET[12:].startswith(choice["text"])
    assert choice["citations"][0]["sources"][0]["document"] == "secret"
    assert Memory(folder / "memory").entries().live_documents.names[-1] == "secret"  # it is on disk
    assert client.delete(f"{PATH}/secret").json() == {"name": "secret", "deleted": 1}
    assert secret_score(client) == pytest.approx(before, abs=1e-4)
    assert client.get(PATH).json() == held


def test_a_document_that_would_hold_the_model_for_long_is_refused(folder):
    client = client_of(server_of(open_attached(folder), limits=Limits(document_bytes=40)))
    refused = client.post(PATH, json={"name": "long", "text": "n\u00fc" * 14})
    assert refused.status_code == 413
    assert "it has 42 bytes, a document may have 40 (document_bytes)" in refused.json()["error"]
    assert add(client, "short", "mi7 nu9 ka22") == 201
    assert {"long", "short"} & set(names(client)) == {"short"}


def test_namesakes_are_refused_and_the_same_text_is_not(client):
    assert [add(client, "one"), add(client, "one"), add(client, "one", "nu1"), add(client, "two")] == [
        201,
        409,
        409,
        201,
    ]
    assert client.delete(f"{PATH}/one").status_code == 200
    assert client.delete(f"{PATH}/one").status_code == 404
    assert add(client, "one") == 201
    assert client.delete(f"{PATH}/doc3.txt").status_code == 200
    assert add(client, "doc3.txt") == 201
    assert {"one", "two", "doc3.txt"} <= set(names(client))


def test_documents_are_listed_by_parts_of_their_names(client):
    assert names(client) == sorted(names(client), key=names(client).index)
    assert len(names(client, containing="DOC1")) == 11
    assert names(client, limit=2, offset=1) == names(client)[1:3]
    assert client.get(PATH, params={"containing": "doc1", "limit": 3}).json()["total"] == 11
    for wrong in ({"limit": -1}, {"offset": "x"}, {"limit": 10**9}):
        assert client.get(PATH, params=wrong).status_code == 422


def test_names_are_data(folder):
    """Whatever a name looks like, nothing is read or written but the memory."""
    before = {path for path in folder.parent.rglob("*") if "memory" not in path.parts}
    app = server_of(open_attached(folder))
    client = client_of(app)
    with in_thread(app) as address:
        for where in (f"{PATH}/", f"{PATH}?name="):
            for name in NAMES:
                assert add(client, name) == 201, name
            assert names(client)[-len(NAMES) :] == NAMES
            for name in NAMES:
                as_it_is = HTTPConnection(address.removeprefix("http://"))  # other clients tidy paths up
                as_it_is.request("DELETE", where + quote(name, safe=""))
                assert json.load(as_it_is.getresponse()) == {"name": name, "deleted": 1}
            assert len(names(client)) == 30
    assert {path for path in folder.parent.rglob("*") if "memory" not in path.parts} == before
    half = client.post(PATH, content=b'{"name": "\\ud800", "text": "a"}', headers={"Content-Type": "application/json"})
    assert half.status_code == 422


def test_a_memory_that_another_process_writes_is_left_alone_for_now(client, folder):
    with only_writer(folder / "memory"):
        for found in (
            client.post(PATH, json={"name": "one", "text": SECRET}),
            client.delete(f"{PATH}/doc1.txt"),
        ):
            assert found.status_code == 503
            assert "is being written by another process" in found.json()["error"]
            assert found.headers["retry-after"]
        assert len(names(client)) == 30
        assert secret_score(client) < 0
    assert add(client, "one") == 201


@pytest.mark.slow
def test_an_index_takes_in_what_was_added(folder):
    """With an index that can: few entries are searched beside it, and many are put into it."""
    attached = open_attached(folder)

    def with_index(model: Model) -> Model:
        searcher, _ = make_searcher(
            model.store, folder / "other", IndexSettings(kind="faiss", recall=0.9, neighbours=8)
        )
        model.models.search = replace(model.search, searcher=searcher)
        return model

    held: list[Model] = []
    client = client_of(server_of(attached, lambda model: held.append(with_index(model)) or held[0]))
    searcher, before = held[0].search.searcher, secret_score(client)
    begun = searcher.next_id
    assert add(client, "secret") == 201
    assert searcher.next_id == begun
    assert secret_score(client) > before + 5
    assert add(client, "long", "nu1 nu2 nu3 .\n" * 1500) == 201
    assert searcher.next_id > begun + 8192
    assert secret_score(client) > before + 5
    for name in ("secret", "long"):
        assert client.delete(f"{PATH}/{name}").status_code == 200
    assert secret_score(client) == pytest.approx(before, abs=0.1)


def test_explain_tells_what_the_memory_does(client):
    assert add(client, "secret") == 201
    found = client.post("/explain", json={"text": SECRET, "position": [6, 0]}).json()
    assert "".join(each["token"] for each in found["tokens"]).replace("↵", "") == SECRET
    for each in found["tokens"]:
        assert 0 <= each["network"] <= 1
    assert sum(each["log_probability"] - each["without_memory"] for each in found["tokens"]) > 5
    six, none = found["positions"]
    assert (six["position"], none["position"]) == (6, 0)
    assert math.log(six["probability"]) == pytest.approx(found["tokens"][6]["log_probability"], abs=1e-3)
    nearest = six["neighbours"][0]
    assert (nearest["document"], nearest["offset"], nearest["distance"]) == ("secret", 6, 0)
    assert SECRET.startswith(nearest["before"] + nearest["token"])
    assert 0 < sum(each["weight"] for each in six["neighbours"]) <= 1 + 1e-4
    assert client.post("/explain", json={"prompt": SECRET}).json() == {**found, "positions": []}
    assert client.delete(f"{PATH}/secret").status_code == 200
    after = client.post("/explain", json={"text": SECRET, "position": 6}).json()
    assert "secret" not in {each["document"] for each in after["positions"][0]["neighbours"]}


@pytest.mark.slow
def test_held_out_passages_find_nothing_of_themselves(folder):
    attached = open_attached(folder)
    explorer, test = Explorer(AttachedModels(attached)), attached.corpus.split("test")
    said = [explorer.passage(CorpusPassage("test", document, 0, 2000))["models"] for document in range(len(test.names))]
    plain = np.concatenate([each["plain"]["log_probabilities"] for each in said])
    figures = attached.combiner_artifact.facts["figures"]["test"]
    assert math.exp(-plain.mean()) == pytest.approx(figures["plain"], rel=1e-4)
    # More was remembered since it was measured, but not the document itself: that would give all of it away.
    adaptive = np.concatenate([each["adaptive"]["log_probabilities"] for each in said])
    assert math.exp(-adaptive.mean()) == pytest.approx(figures["adaptive"], rel=0.25)
    place = CorpusPassage("test", 1, 5, 40)
    own = set()
    for at in range(40):
        token = explorer.token(place, at)
        places = [each for match in token["matches"] for each in match["places"]]
        own |= {each["document"] for each in [*token["neighbours"], *places]}
    assert test.names[1] not in own
    assert test.names[0] in own


def test_a_deleted_document_of_dev_or_test_is_not_handed_out(folder):
    attached = open_attached(folder)
    client = client_of(make_server(load_model(folder, Hardware("cpu", 1))))
    for split in ("dev", "test"):
        name = attached.corpus.split(split).names[0]
        place = {"place": {"split": split, "document": 0, "offset": 0, "length": 20}}
        assert client.get("/api/documents", params={"split": split, "containing": name}).json()[0]["name"] == name
        assert client.post("/api/passage", json=place).status_code == 200
        assert client.delete(f"/memory/documents/{name}").status_code == 200
        assert client.get("/api/documents", params={"split": split, "containing": name}).json() == []
        for path, more in (("passage", {}), ("trace", {}), ("token", {"position": 0})):
            answer = client.post(f"/api/{path}", json={**place, **more})
            assert answer.status_code == 422
            assert "was forgotten" in answer.json()["error"]


def test_a_model_of_ones_own_run_is_served_too(finished, tmp_path):
    folder = copied(finished.directory, tmp_path / "run")
    client = client_of(make_server(load_model(folder, Hardware("cpu", 1), "spalm")))
    assert client.get("/v1/models").json()["data"][0]["id"] == "run/spalm"
    asked = {"prompt": "ka1 lo2 mi3 .\nka1", "max_tokens": 5, "echo": True, "logprobs": 2, "temperature": 0}
    (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
    assert choice["text"].startswith(asked["prompt"] + " ")
    assert choice["logprobs"]["text_offset"][-1] < len(choice["text"])
    assert add(client, "note", "ka1 lo2 mi3 .\n" * 5) == 201
    assert names(client, containing="note") == ["note"]
    explained = client.post("/explain", json={"text": "ka1 lo2 mi3 .\n" * 2, "position": 3}).json()
    assert explained["positions"][0]["neighbours"]
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "ka1"}]})
    assert chat.status_code == 400
    assert "no chat template" in chat.json()["error"]["message"]
    assert client.get("/api/about").json()["models"][0]["name"] == "transformer"
