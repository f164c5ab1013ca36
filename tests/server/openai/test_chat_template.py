"""Tokenisers and chat templates that somebody else made: a line when the server begins, never an error of kind 500."""

import json

import pytest

from spalm.errors import InputError
from support.servers import client_of, copied, open_attached, server_of


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("tokenizer_config.json", '{"tokenizer_class": "NoSuchTokenizer", "chat_template": 3}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\x00"),
    ],
)
def test_a_damaged_tokeniser_is_a_line_when_the_server_begins(attached_folder, tmp_path, name, content):
    folder = copied(attached_folder, tmp_path / "tiny")
    (folder / name).write_text(content)
    with pytest.raises(InputError) as caught:
        server_of(open_attached(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[99].x.y }}", "{{ 'x' * 'y' }}", "{% if %}", "{{ 7 | no }}"]
)
def test_a_template_that_fails_refuses_the_messages(attached_folder, tmp_path, template):
    client = client_of(server_of(open_attached(copied(attached_folder, tmp_path / "tiny", template))))
    message = {"role": "user", "content": "x"}
    for path, body in (
        ("/v1/chat/completions", {"messages": [message]}),
        ("/api/chat", {"model": "tiny", "messages": [message]}),
        ("/api/generate", {"model": "tiny", "prompt": "x"}),
    ):
        found = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert found.status_code in (400, 422), found.text
        assert "chat template refuses them" in found.text
