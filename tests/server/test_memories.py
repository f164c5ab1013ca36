"""Several memories beside one model, over HTTP: chosen by request, and only those to which the key has a right."""

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import spalm
from spalm.errors import InputError
from spalm.generation import Model
from spalm.server import Keys, make_server, read_keys
from support.commands import refused
from support.servers import TEMPLATE, client_of, copied
from support.several_memories import CPU, MemoryFoldersOfTests, trusting, write_memories

COMPLETIONS, CHAT, DOCUMENTS = "/v1/completions", "/v1/chat/completions", "/memory/documents"
PROMPT = "zz9 qq8"
NORTHERN = {"zz7", "qq6", "zz3", "zz1", "zz2", "note.md"}
"""Words and names that only the northern memory holds."""
SOUTHERN = {"xx1", "yy2", "xx3", "yy4", "xx7", "yy9"}
MASTER, NORTH, SOUTH, NOBODY = "all-of-them", "north-only", "south-and-changes", "none"
KEYS = [
    {"key": NORTH, "reads": ["north"]},
    {"key": SOUTH, "changes": ["south"]},
    {"key": NOBODY},
]


@pytest.fixture(scope="module")
def folders(attached_folder, tmp_path_factory) -> MemoryFoldersOfTests:
    folder = tmp_path_factory.mktemp("memories")
    return write_memories(copied(attached_folder, folder / "attached", TEMPLATE), folder)


@pytest.fixture(scope="module")
def model(folders) -> Model:
    return trusting(spalm.load(folders.own, memories=folders.further, execution=CPU))


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps(KEYS))
    return file


@pytest.fixture(scope="module")
def client(model) -> TestClient:
    """Of a server without keys."""
    return client_of(make_server(model))


@pytest.fixture(scope="module")
def guarded(model, keys) -> TestClient:
    """Of a server with keys."""
    return client_of(make_server(model, key=MASTER, keys=read_keys(keys)))


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(client: TestClient, path: str = COMPLETIONS, key: str = MASTER, **asked) -> dict:
    given = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": PROMPT}]}
    settings = {"max_tokens": 8, "temperature": 0, "cite": True}
    found = client.post(path, json={**given, **settings, **asked}, headers=by(key))
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def memories_of(choice: dict) -> set[str]:
    """The memories of all sources and passages."""
    cited = {source["memory"] for each in choice.get("citations", []) for source in each["sources"]}
    return cited | {each["memory"] for each in choice.get("passages", [])}


def answer_of(choice: dict) -> tuple:
    """What an answer says and names, without numbers that are subject to rounding."""
    cited = [
        (each["start"], each["end"], [(s["memory"], s["document"], s["offset"]) for s in each["sources"]])
        for each in choice.get("citations", [])
    ]
    passages = [(each["memory"], each["document"], each["offset"]) for each in choice.get("passages", [])]
    return choice.get("text", choice.get("message")), cited, passages


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_memories_are_chosen_by_request_and_named_in_citations_and_passages(client, path):
    north = ask(client, path, memories=["north"], passages=2)
    south = ask(client, path, memories=["south"], passages=2)
    assert memories_of(north) == {"north"}
    assert memories_of(south) == {"south"}
    assert {each["document"] for each in south["passages"]} == {"map.md"}
    both = ask(client, path, memories=["south", "north"], passages=8)
    assert memories_of(both) == {"north", "south"}
    everything = ask(client, path, passages=8)
    assert memories_of(everything) >= {"north", "south"}
    named = ask(client, path, memories=["own", "north", "south", "north"], passages=8)
    assert answer_of(everything) == answer_of(named)
    none = ask(client, path, memories=[], passages=2)
    assert (none["citations"], none["passages"]) == ([], [])
    assert answer_of(ask(client, path, memory=False)) == answer_of(ask(client, path, memories=[]))


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_ollamas_routes(client, guarded, path):
    text = {"messages": [{"role": "user", "content": PROMPT}]} if path.endswith("chat") else {"prompt": PROMPT}
    asked = {"model": "own", "stream": False, "cite": True, "passages": 2, "options": {"num_predict": 6}, **text}
    found = client.post(path, json={**asked, "memories": ["south"]}).json()
    assert memories_of(found) == {"south"}
    assert memories_of(guarded.post(path, json=asked, headers=by(NORTH)).json()) == {"north"}
    assert guarded.post(path, json={**asked, "memories": ["south"]}, headers=by(NORTH)).status_code == 403


def test_unknown_names_are_refused(client):
    found = client.post(COMPLETIONS, json={"prompt": PROMPT, "memories": ["north", "nroth"]})
    assert found.status_code == 404
    error = found.json()["error"]
    assert (error["param"], error["code"]) == ("memories", "memory_not_found")
    assert error["message"] == "there is no memory 'nroth'; this server has 'own', 'north', 'south'"
    assert client.get(DOCUMENTS, params={"memory": "nroth"}).status_code == 404
    for wrong in ("north", [["north"]], [7], ["x"] * 1025):
        assert client.post(COMPLETIONS, json={"prompt": PROMPT, "memories": wrong}).status_code == 400, wrong


# Rights


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("key", "own", "foreign"), [(NORTH, "north", SOUTHERN), (SOUTH, "south", NORTHERN)])
def test_a_key_gets_nothing_of_a_memory_to_which_it_has_no_right(guarded, path, stream, key, own, foreign):
    """What it gets without a choice is what is got by choosing its memories: the others take no part at all."""
    asked = {"passages": 8, "max_tokens": 12}
    given = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": PROMPT}]}
    whole = {
        **given,
        **asked,
        "temperature": 0,
        "cite": True,
        "stream": stream,
        "logprobs": 5 if path == COMPLETIONS else True,
    }
    found = guarded.post(path, json=whole, headers=by(key))
    assert found.status_code == 200
    assert f'"{own}"' in found.text
    assert not any(word in found.text for word in foreign)
    assert '"own"' not in found.text.replace('"model":"own"', "").replace('"model": "own"', "")
    chosen = ask(guarded, path, key=MASTER, memories=[own], **asked)
    assert answer_of(ask(guarded, path, key=key, **asked)) == answer_of(chosen)
    assert memories_of(ask(guarded, path, key=MASTER, **asked)) >= {"north", "south"}, "there is more to get"


def test_a_key_without_any_right_gets_the_model_alone(guarded):
    found = ask(guarded, key=NOBODY, passages=2)
    assert (found["citations"], found["passages"]) == ([], [])
    assert found["text"] == ask(guarded, memory=False, cite=False)["text"]
    assert guarded.get("/memory", headers=by(NOBODY)).json() == {"memories": []}


def test_what_a_key_may_not_use_is_refused_as_what_does_not_exist(guarded):
    """In one clear line, the same but for the name that the client itself gave."""

    def refusal(method: str, path: str, name: str, **given) -> tuple[int, str]:
        found = guarded.request(method, path, headers=by(NORTH), **given)
        assert "\n" not in found.text
        return found.status_code, found.text.replace(name, "NAME")

    for name in ("south", "own", "nothing"):
        expected = 403, "this key has no right to the memory 'NAME'"
        for path, given in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            status, text = refusal("POST", path, name, json={**given, "memories": ["north", name]})
            assert (status, json.loads(text)["error"]["message"]) == expected
        for method, more in (
            ("GET", {"params": {"memory": name}}),
            ("POST", {"json": {"name": "map.md", "text": "a", "memory": name}}),
            ("DELETE", {"params": {"memory": name, "name": "map.md"}}),
        ):
            status, text = refusal(method, DOCUMENTS, name, **more)
            assert (status, json.loads(text)["error"]) == expected


def test_what_shows_the_directorys_own_texts_needs_the_right_to_its_memory(guarded):
    place = {"place": {"split": "test", "document": 0, "offset": 0, "length": 5}}
    for method, path, given in (
        ("POST", "/explain", {"json": {"text": PROMPT, "position": 1}}),
        ("GET", "/api/about", {}),
        ("GET", "/api/documents", {"params": {"split": "test"}}),
        ("POST", "/api/passage", {"json": place}),
        ("POST", "/api/trace", {"json": place}),
        ("POST", "/api/token", {"json": {**place, "position": 0}}),
        ("GET", "/metrics", {}),
        ("GET", DOCUMENTS, {}),
        ("POST", DOCUMENTS, {"json": {"name": "x", "text": "y"}}),
        ("DELETE", f"{DOCUMENTS}/doc1.txt", {}),
    ):
        assert guarded.request(method, path, headers=by(NORTH), **given).status_code == 403, path
        if method != "DELETE" and path != DOCUMENTS:
            assert guarded.request(method, path, headers=by(MASTER), **given).status_code == 200, path
        assert guarded.request(method, path, **given).status_code == 401, path


def test_memories_are_listed_by_rights(guarded):
    def listed(key: str) -> list[tuple[str, bool]]:
        found = guarded.get("/memory", headers=by(key)).json()["memories"]
        return [(each["name"], each["may_change"]) for each in found]

    assert listed(MASTER) == [("own", True), ("north", True), ("south", True)]
    assert listed(NORTH) == [("north", False)]
    assert listed(SOUTH) == [("south", True)]
    north = guarded.get(DOCUMENTS, params={"memory": "north"}, headers=by(NORTH)).json()
    assert [each["name"] for each in north["documents"]] == ["map.md", "note.md"]
    (described,) = guarded.get("/memory", headers=by(NORTH)).json()["memories"]
    assert (described["documents"], described["entries"]) == (2, north["entries"])


def test_documents_are_changed_in_the_memory_that_is_named_by_keys_that_may(guarded):
    document = {"name": "new.md", "text": "vv1 ww2 vv3 ww4 .\n" * 2}
    found = guarded.post(DOCUMENTS, json={**document, "memory": "north"}, headers=by(NORTH))
    assert found.status_code == 403
    assert found.json()["error"] == "this key may use the memory 'north', but not change it"
    deleted = guarded.delete(f"{DOCUMENTS}/map.md", params={"memory": "north"}, headers=by(NORTH))
    assert deleted.status_code == 403
    assert guarded.post(DOCUMENTS, json={**document, "memory": "south"}, headers=by(SOUTH)).status_code == 201
    asked = {"prompt": "vv1 ww2", "passages": 2}
    assert "south" in memories_of(ask(guarded, **asked))
    assert "new.md" in json.dumps(ask(guarded, key=SOUTH, **asked))
    assert "new.md" not in json.dumps(ask(guarded, key=NORTH, **asked))
    where = {"memory": "south", "name": "new.md"}
    assert guarded.delete(DOCUMENTS, params=where, headers=by(SOUTH)).json() == {"name": "new.md", "deleted": 1}
    assert guarded.delete(DOCUMENTS, params=where, headers=by(SOUTH)).status_code == 404
    assert "new.md" not in json.dumps(ask(guarded, **asked))


def test_other_keys_are_refused(guarded):
    for wrong in ("", "north", NORTH + "x", NORTH[:-1], "north-only,none"):
        assert guarded.get("/v1/models", headers=by(wrong)).status_code == 401
    assert guarded.get("/v1/models").status_code == 401
    assert guarded.get("/health").status_code == 200


# The file of keys


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("{}", "holds no keys"),
        ("[]", "holds no keys"),
        ("[7]", "number 1"),
        ('[{"key": "a"}, {"reads": []}]', "number 2: key: Field required"),
        ('[{"key": "", "reads": []}]', "number 1: key"),
        ('[{"key": "secret-7", "reads": "north"}]', "number 1: reads"),
        ('[{"key": "secret-7", "raeds": []}]', "number 1: raeds"),
        ('[{"key": "secret-7"}, {"key": "secret-7", "reads": ["north"]}]', "two keys are the same"),
    ],
)
def test_a_wrong_file_of_keys_is_refused_in_a_line_without_keys(tmp_path, content, why):
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(InputError, match=why) as error:
        read_keys(file)
    assert "\n" not in str(error.value)
    assert "secret-7" not in str(error.value)


def test_rights_to_unknown_memories_are_refused(keys, model):
    found = read_keys(keys)
    found.refuse_unknown_memories(model.memories, keys)
    with pytest.raises(InputError, match="there is no memory 'south'; this server has 'own', 'north'"):
        found.refuse_unknown_memories(["own", "north"], keys)
    with pytest.raises(InputError, match="a key is empty"):
        Keys().add("")


@pytest.mark.slow
def test_the_command_refuses_what_it_cannot_serve(folders, keys, tmp_path):
    assert refused("serve", folders.own, "--memory", folders.north, "--keys", keys, "--port", 0)
    assert refused("serve", folders.own, "--keys", tmp_path / "nothing.json", "--port", 0)
    assert refused("serve", folders.own, "--memory", tmp_path / "nothing", "--port", 0)
