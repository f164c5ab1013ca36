"""Downloads against a real server on this machine: resumed, checked, unpacked."""

import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spalm.corpus.download import OfficialArchive, download_corpus
from spalm.errors import InputError


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        opened.writestr("corpus/a.txt", "a" * 100_000)
        opened.writestr("corpus/../../b.txt", "b")
        opened.writestr("corpus/unwanted.txt", "c")
    return buffer.getvalue()


@pytest.fixture
def server():
    """Serves one archive; `cut_after` makes it hang up early, `asked` records where each request began."""

    class Handler(BaseHTTPRequestHandler):
        content, cut_after, asked = archive(), None, []

        def do_GET(self):
            wanted = self.headers.get("Range")
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
            type(self).asked.append(start)
            if start >= len(self.content):
                self.send_error(416)
                return
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(self.content) - start))
            self.end_headers()
            self.wfile.write(self.content[start : self.cut_after])

        def log_message(self, *_):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    Handler.url = f"http://127.0.0.1:{running.server_port}/corpus.zip"
    yield Handler
    running.shutdown()
    running.server_close()


def official(server, digest: str | None = None) -> OfficialArchive:
    return OfficialArchive(server.url, digest or hashlib.sha256(server.content).hexdigest(), ("a.txt", "b.txt"))


def test_fetched_checked_and_unpacked(server, tmp_path):
    folder = download_corpus("corpus", tmp_path, official(server))
    assert (folder / "a.txt").read_text() == "a" * 100_000
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt"]
    assert not (tmp_path.parent / "b.txt").exists()
    download_corpus("corpus", tmp_path, official(server))
    assert len(server.asked) == 1


def test_interrupted_it_goes_on_where_it_was(server, tmp_path):
    server.cut_after = 40_000
    with pytest.raises(InputError, match="resume"):
        download_corpus("corpus", tmp_path, official(server))
    assert not (tmp_path / "corpus" / "a.txt").exists()
    server.cut_after = None
    download_corpus("corpus", tmp_path, official(server))
    assert server.asked == [0, 40_000]


@pytest.mark.parametrize("name", ["corpus.zip.partial", "a.txt.partial", "b.txt.partial"])
def test_nothing_is_written_through_a_link(server, tmp_path, name):
    victim, folder = tmp_path / "victim", tmp_path / "corpus"
    victim.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    if "zip" in name:
        with pytest.raises(InputError, match=r"corpus.zip.partial is not a regular file; remove it"):
            download_corpus("corpus", tmp_path, official(server))
    else:
        download_corpus("corpus", tmp_path, official(server))
        assert (folder / "a.txt").read_text() == "a" * 100_000
    assert victim.read_text() == "mine"


def test_a_wrong_digest_is_refused(server, tmp_path):
    with pytest.raises(InputError, match="has digest"):
        download_corpus("corpus", tmp_path, official(server, "0" * 64))
    assert list((tmp_path / "corpus").iterdir()) == []


def test_unknown_names_and_no_network(tmp_path):
    with pytest.raises(InputError, match="not among wikitext-103"):
        download_corpus("wikitext-104", tmp_path)
    with pytest.raises(InputError, match="cannot reach"):
        download_corpus("x", tmp_path, OfficialArchive("http://127.0.0.1:9/x.zip", "0", ("x",)))


def test_an_archive_in_place_is_checked_before_it_is_unpacked(server, tmp_path):
    place = tmp_path / "corpus" / "corpus.zip"
    place.parent.mkdir()
    place.write_bytes(server.content.replace(b"a" * 40, b"x" * 40))
    with pytest.raises(InputError, match=r"has digest .*; remove .*corpus\.zip to fetch it again"):
        download_corpus("corpus", tmp_path, official(server, hashlib.sha256(server.content).hexdigest()))
    assert [path.name for path in place.parent.iterdir()] == ["corpus.zip"]
    place.write_bytes(server.content)
    download_corpus("corpus", tmp_path, official(server))
    assert not server.asked
    assert (tmp_path / "corpus" / "a.txt").exists()
