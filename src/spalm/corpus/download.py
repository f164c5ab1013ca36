"""Downloads of official corpora: resumed when interrupted, checked by digest, unpacked."""

import os
import shutil
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from spalm.console import bar, say
from spalm.digests import digest_of_file
from spalm.errors import InputError
from spalm.files import replacing


@dataclass(frozen=True)
class OfficialArchive:
    """A published archive."""

    url: str
    """Address of the archive."""
    sha256: str
    """Digest of the archive."""
    holds: tuple[str, ...]
    """Names of the files that are wanted from the archive, without their folders."""


OFFICIAL_CORPORA = {
    "wikitext-103": OfficialArchive(
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    ),
    "wikitext-2": OfficialArchive(
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    ),
    "enwik8": OfficialArchive(
        "http://mattmahoney.net/dc/enwik8.zip",
        "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        ("enwik8",),
    ),
}
"""Archives of the corpora that can be downloaded, by the name of the corpus."""


def download_corpus(name: str, folder: Path, official: OfficialArchive | None = None) -> Path:
    """Puts the files of the corpus `name` into folder/name and returns that folder.

    A file gets its final name only once it is checked.
    """
    if official is None and name not in OFFICIAL_CORPORA:
        raise InputError(
            f"{name!r} is not among {', '.join(OFFICIAL_CORPORA)}; WMT news needs an account of its own: fetch "
            "news-docs.2019.en.filtered.gz from WMT's news crawl by hand and give its path"
        )
    official = official or OFFICIAL_CORPORA[name]
    target = folder / name
    if all((target / file).exists() for file in official.holds):
        say(f"{target} is there already")
        return target
    target.mkdir(parents=True, exist_ok=True)
    archive = target / official.url.rsplit("/", 1)[-1]
    if archive.exists():
        _refuse_changed(archive, official, f"remove {archive} to fetch it again")
    else:
        _fetch(official, archive)
    with zipfile.ZipFile(archive) as opened:
        for member in opened.namelist():
            file = member.rsplit("/", 1)[-1]
            if file in official.holds:
                with opened.open(member) as source, replacing(target / file) as path, path.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    archive.unlink()
    return target


def _fetch(official: OfficialArchive, archive: Path) -> None:
    """Downloads an archive, going on from an interrupted download, and checks its digest."""
    partial = archive.with_name(archive.name + ".partial")
    if partial.is_symlink() or (partial.exists() and not partial.is_file()):
        raise InputError(f"{partial} is not a regular file; remove it")
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(official.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            resumed = reply.status == 206
            rest = int(reply.headers.get("Content-Length", 0))
            have = have if resumed else 0
            with (
                open(partial, "ab" if resumed else "wb", opener=_without_links) as sink,
                bar(archive.name, have + rest or None, have) as progress,
            ):
                while block := reply.read(1 << 20):
                    sink.write(block)
                    progress.advance(len(block))
                if rest and sink.tell() < have + rest:
                    raise ConnectionError("the connection broke off")
    except urllib.error.HTTPError as error:
        # 416: an earlier run had downloaded the whole file but not checked it.
        if error.code != 416:
            raise InputError(f"{official.url} answered {error.code} {error.reason}; fetch the file by hand") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(
            f"cannot reach {official.url} ({reason}); run again to resume, or put the corpus in place by hand"
        ) from None
    try:
        _refuse_changed(partial, official, "try again later")
    except InputError:
        partial.unlink()
        raise
    partial.replace(archive)


def _without_links(path: str, flags: int) -> int:
    """Opens a file, unless it is a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _refuse_changed(path: Path, official: OfficialArchive, remedy: str) -> None:
    """Raises an error unless a file is the official archive, whoever has put it there."""
    found = digest_of_file(path)
    if found != official.sha256:
        raise InputError(
            f"{path} has digest {found[:12]}…, {official.url} is to have {official.sha256[:12]}…; {remedy}"
        )
