"""The example configuration of nginx, started for real in front of a server."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from spalm.server import Limits, allowed_hosts
from support.servers import client_of, in_thread, server_of, wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIGURATION = Path(__file__).parents[3] / "examples" / "nginx.conf"
NAME = "models.example.org"
PATIENCE = 30

pytestmark = pytest.mark.skipif(
    not (NGINX and shutil.which("openssl")), reason="nginx or openssl is not installed (apt-get install nginx openssl)"
)


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def running_nginx(folder: Path, upstream: str) -> Iterator[int]:
    """The port of nginx, as the example configures it but for ports and the times that clients get."""
    port = free_port()
    (folder / "temp").mkdir()
    text = CONFIGURATION.read_text()
    for old, new in (
        ("127.0.0.1:8765", upstream.removeprefix("http://")),
        ("127.0.0.1:8443", f"127.0.0.1:{port}"),
        ("client_header_timeout 10s", "client_header_timeout 1s"),
        ("limit_conn connections 32", "limit_conn connections 4"),
        ("client_max_body_size 8m", "client_max_body_size 64k"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    certificate = ["-out", "certificate.pem", "-keyout", "certificate.key", "-subj", f"/CN={NAME}", "-days", "2"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run([*command, *certificate], cwd=folder, check=True, capture_output=True)
    errors = folder / "errors"
    with errors.open("w") as log:
        process = subprocess.Popen([NGINX, "-p", folder, "-c", "nginx.conf"], cwd=folder, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or is_open(port), "nginx did not begin")
        assert process.poll() is None, errors.read_text()
        yield port
    finally:
        process.terminate()
        process.wait(PATIENCE)


def is_open(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_example_serves_streams_and_refuses(attached, tmp_path):
    hosts = allowed_hosts("127.0.0.1", [NAME])
    app = server_of(attached, limits=Limits(body_bytes=1 << 20), key="secret", hosts=hosts)
    with in_thread(app) as upstream, running_nginx(tmp_path, upstream) as port:
        context = ssl.create_default_context(cafile=tmp_path / "certificate.pem")
        headers = {"Host": NAME, "Authorization": "Bearer secret"}
        own_name = {"sni_hostname": NAME}
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=context, timeout=PATIENCE, headers=headers
        ) as client:

            def post(path: str, **more) -> httpx.Response:
                return client.post(path, extensions=own_name, **more)

            assert client.get("/health", extensions=own_name).json()["status"] == "ok"
            asked = {"prompt": "ka1", "max_tokens": 5, "stream": True}
            page = post("/v1/completions", json=asked, headers={"Origin": f"https://{NAME}"})
            assert page.text.endswith("data: [DONE]\n\n")
            elsewhere = post("/v1/completions", json=asked, headers={"Origin": "https://evil.example"})
            assert elsewhere.status_code == 403
            assert post("/v1/completions", json=asked, headers={"Authorization": "no"}).status_code == 401
            assert post("/v1/completions", json={"prompt": "x" * 70_000}).status_code == 413
            other = client.get("/health", extensions=own_name, headers={"Host": "evil.example"})
            assert other.status_code == 400
        requests = app.state.server.server_state.total_requests
        slow = socket.create_connection(("127.0.0.1", port), PATIENCE)
        with context.wrap_socket(slow, server_hostname=NAME) as secure:
            secure.sendall(b"GET /health HTTP/1.1\r\nHost: ")
            assert b"200" not in secure.recv(1000)  # it is ended
        assert app.state.server.server_state.total_requests == requests


def test_a_server_behind_a_proxy_knows_its_name(attached):
    client = client_of(server_of(attached, hosts=allowed_hosts("127.0.0.1", [NAME])))
    assert client.get("/health", headers={"Host": NAME}).status_code == 200
