"""Hostile requests: bytes that are hardly HTTP, and JSON bodies with fields that nobody expects."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np

from support.hostile import VALUES

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/models/x", "/memory/documents"),
    *("/api/generate", "/api/chat", "/api/embed", "/api/show", "/api/passage", "/api/token", "/api/trace", "/explain"),
    *("/api/documents", "/health", "/metrics", "/", "/explorer.js", "/nothing"),
)
SAMPLING = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, "n": 1, "stop": ["x"], "stream": False},
    **{"logit_bias": {}, "stream_options": {}, "memory": True, "cite": True, "frequency_penalty": 0},
}
OPTIONS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "num_predict": 3, "stop": [], "seed": 1}
MESSAGES = [{"role": "user", "content": "ka1"}]
PASSAGE = {"text": "ka1 lo2", "entries_off": [1], "documents_off": [1]}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ka1", "max_tokens": 3, "logprobs": 2, "echo": True, "best_of": 1, **SAMPLING},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, **SAMPLING},
    "/v1/embeddings": {"input": "ka1", "encoding_format": "float", "dimensions": None},
    "/api/generate": {
        "model": "tiny",
        "prompt": "ka1",
        "system": "x",
        "raw": True,
        "stream": False,
        "options": OPTIONS,
    },
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "stream": False, "options": OPTIONS},
    "/api/embed": {"model": "tiny", "input": ["ka1"]},
    "/api/embeddings": {"model": "tiny", "prompt": "ka1"},
    "/api/show": {"model": "tiny", "name": "tiny"},
    "/memory/documents": {"name": "new", "text": "ka1 lo2"},
    "/explain": {"text": "ka1 lo2", "position": [0]},
    "/api/passage": {"place": {"split": "test", "document": 0, "offset": 0, "length": 5}},
    "/api/token": {**PASSAGE, "position": 1},
    "/api/trace": PASSAGE,
}
"""A good body for each path that takes one."""
NUMBERS: tuple[Any, ...] = (
    *(1e-320, 5e-324, 1e-40, 1e40, 1e308, 0.1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**40, -(2**63), -1, 0, -0.0),
    *("1", "1e-320", "0x10", True, [2**63], [-1], [1.5], ["", ""], [[]], [{}] * 50, [[0]] * 50, "\ud800", "\0" * 50),
    *("\udc80abc", "a" * 60_000, {"a": {"b": [None] * 100}}, ["x" * 2000] * 20),
)
QUERIES = ("offset", "limit", "containing", "split", "name", "x" * 3000)


def bodies() -> Iterator[tuple[str, bytes]]:
    """Yields paths and JSON bodies: each field of each good body, with each hostile value."""
    for path, good in GOOD.items():
        for holder, key in _fields(good):
            for value in (*NUMBERS, *VALUES):
                changed = json.loads(json.dumps(good))
                _at(changed, holder)[key] = value
                yield path, json.dumps(changed).encode()


def _fields(good: dict[str, Any], prefix: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Yields the places of the fields of a body: the way to what holds it, and its key."""
    for key, value in good.items():
        yield prefix, key
        if isinstance(value, dict):
            yield from _fields(value, (*prefix, key))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _fields(value[0], (*prefix, key, 0))


def _at(value: Any, way: tuple) -> Any:
    for key in way:
        value = value[key]
    return value


def raw_request(random: np.random.Generator) -> bytes:
    """Returns the bytes of a random request that is wrong in some way."""
    path, body = str(random.choice(PATHS)), b'{"prompt": "ka1", "max_tokens": 1}'
    host = b"Host: 127.0.0.1"
    json_type = b"Content-Type: application/json"
    length = b"Content-Length: %d" % len(body)
    target, method, version = path.encode(), b"POST", b"HTTP/1.1"
    headers = [host, json_type, length]
    match random.integers(20):
        case 0:
            method = bytes(random.choice([b"", b"\0", b"GET\t", b"P" * 9000, b"get", b"TRACE", b"CONNECT", b"\xff"]))
        case 1:
            target = quote(random.bytes(30)).encode() if random.integers(2) else random.bytes(30)
        case 2:
            target += b"?" + str(random.choice(QUERIES)).encode() + b"=" + _query_value(random)
            method, body, headers = bytes(random.choice([b"GET", b"DELETE"])), b"", [host]
        case 3:
            version = bytes(random.choice([b"HTTP/0.9", b"HTTP/9.9", b"", b"HTTP/1.1 x", b"HTTPS/1.1", b"HTTP/1.0"]))
        case 4:
            headers = [
                host,
                json_type,
                b"Content-Length: " + bytes(random.choice([b"-1", b"x", b"9" * 30, b"1e3", b""])),
            ]
        case 5:
            headers.append(b"Content-Length: 5")
        case 6:
            headers = [host, json_type, b"Transfer-Encoding: chunked"]
            body = bytes(
                random.choice([b"zz\r\n", b"5\r\nabc", b"f" * 40 + b"\r\n", b"-1\r\n\r\n", b"0\r\n\r\n", b"5;" * 9])
            )
        case 7:
            headers += [b"Transfer-Encoding: chunked"]
        case 8:
            headers.append(b"X-" + b"a" * int(random.integers(1, 100_000)) + b": 1")
        case 9:
            headers += [b"X-%d: 1" % number for number in range(int(random.integers(1, 5000)))]
        case 10:
            headers = [
                bytes(random.choice([b"", b"Host: evil.example", b"Host: a\0b", b"Host:", b"Host: [", b"Host: \xff"]))
            ]
            headers += [json_type, length]
        case 11:
            headers.append(random.bytes(40))
        case 12:
            headers.append(
                b"Authorization: " + bytes(random.choice([b"Basic ####", b"Bearer \xff", b"Basic " + b"A" * 9999]))
            )
        case 13:
            body = random.bytes(len(body))
        case 14:
            body = bytes(
                random.choice([b"[" * 60_000, b"{" * 9, b"9" * 5000, b'{"prompt":' + b"9" * 4299, b"NaN", b'"\\ud800"'])
            )
            headers = [host, json_type, b"Content-Length: %d" % len(body)]
        case 15:
            headers[1] = b"Content-Type: " + bytes(
                random.choice([b"text/plain", b"", b"application/json; charset=utf-16", b"\xff"])
            )
        case 16:
            headers += [
                b"Upgrade: websocket",
                b"Connection: Upgrade",
                b"Sec-WebSocket-Key: x",
                b"Sec-WebSocket-Version: 13",
            ]
            method = b"GET"
        case 17:
            headers += [b"Expect: 100-continue", b"Origin: http://evil.example", b"X-Forwarded-For: \xff"]
        case 18:
            return random.bytes(int(random.integers(1, 3000)))
        case _:
            target = path.encode() + bytes(
                random.choice([b"/../../etc/passwd", b"/%2e%2e/%2e%2e", b"%00", b"//", b";x", b"%ff%fe", b"/" * 9000])
            )
            method, body, headers = b"GET", b"", [host]
    request = b"\r\n".join([b" ".join([method, target, version]), *headers, b"", body])
    return request[: int(random.integers(1, len(request) + 1))] if random.integers(5) == 0 else request


def _query_value(random: np.random.Generator) -> bytes:
    """Returns a value of a field of an address."""
    value = [*NUMBERS, *VALUES][int(random.integers(len(NUMBERS) + len(VALUES)))]
    return quote(str(value)[:5000].encode(errors="surrogatepass")).encode()


def exchange(address: tuple[str, int], request: bytes, seconds: float) -> bytes:
    """Sends bytes and says that no more come; returns the answer, empty if the server hangs up without one."""
    with socket.create_connection(address, timeout=seconds) as connection:
        answer = bytearray()
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(1 << 16):
                answer += received
        except (ConnectionError, BrokenPipeError):
            pass
        return bytes(answer)
