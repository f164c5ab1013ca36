"""How commands end: stopped, out of memory, with streams that are closed or in another encoding."""

import io
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.table import Table
from rich.text import Text

from spalm.cli import entry, streams
from spalm.cli.failures import explain
from spalm.cli.verbs import command
from spalm.console import Console, print_text
from spalm.corpus import OFFICIAL_CORPORA
from spalm.errors import InputError
from spalm.memory import remember, source_of_text
from spalm.study import ANALYSES
from support.stub_memory import StubEncoder, new_memory, stream

STOPPED = "spalm: stopped; run the same command again to go on from here"
INTERRUPTED = """
import json, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with SIGINT ignored

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            sys.argv[1] = ""
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from spalm.cli import entry

sys.exit(entry.run(sys.argv[2:]))
"""
"""A command that is interrupted while it imports a module for the first time."""
ESCAPES = "\x1b]0;title\x07\x1b[2Jred\x9b31m\u202eevil\r\nline"


def python(*arguments: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **more)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("typer", "--help"),
        ("rich.console", "--help"),
        ("spalm.cli.pipeline", "run demo --out x"),
        ("numpy", "show x"),
        ("torch", "generate x y"),
    ],
)
def test_stopped_during_imports(module, line):
    found = python("-c", INTERRUPTED, module, *line.split())
    assert (found.returncode, found.stderr.strip()) == (130, STOPPED)


def test_stopped_while_it_works(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(entry, "_invoke", interrupted)
    try:
        assert entry.run(["run"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "a second Ctrl-C must not interrupt the end"
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err.strip() == STOPPED


@pytest.mark.parametrize(
    ("allocate", "size"),
    [(torch.empty, 1 << 58), (torch.empty, 1 << 62), (np.zeros, 1 << 55), (np.zeros, 1 << 62), (bytearray, 1 << 60)],
)
def test_out_of_memory(allocate, size):
    with pytest.raises((MemoryError, RuntimeError, ValueError)) as caught:
        allocate(size)
    line, code = explain(caught.value)
    assert line.startswith("out of memory (")
    assert line.endswith("give smaller settings, such as batch sizes and lengths, or use a larger machine")
    assert code == 1


def test_errors_of_spalm_itself_keep_their_traceback(monkeypatch):
    def fail(_):
        raise KeyError("a fault")

    monkeypatch.setattr(entry, "_invoke", fail)
    with pytest.raises(KeyError):
        entry.run(["run"])


@pytest.mark.skipif(os.name != "posix", reason="streams are closed by a POSIX shell")
@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [
        (">&-", 1, "spalm: standard output is closed; send it to a file, or to the null device"),
        ("2>&-", 2, ""),
        (">&- 2>&- <&-", 1, ""),
    ],
)
def test_closed_streams(closed, code, said):
    found = subprocess.run(
        ["sh", "-c", f'"$0" -m spalm nothing {closed}', sys.executable], capture_output=True, text=True
    )
    assert (found.returncode, found.stderr.strip()) == (code, said)


def test_output_that_nobody_reads():
    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run([sys.executable, "-m", "spalm", "--help"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (found.returncode, found.stderr) == (141, b"")


def test_standard_input(monkeypatch):
    for content, expected in ((b"caf\xc3\xa9\r\n", "café\r\n"), (b"", "")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
        assert streams.read_standard_input() == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    with pytest.raises(InputError, match=r"standard input is not UTF-8 \(byte 3\)"):
        streams.read_standard_input()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="which is closed"):
        streams.read_standard_input()


def test_output_is_utf8_whatever_the_locale(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    streams.prepare_streams()
    print("café \udce9")
    sys.stdout.flush()
    assert written.getvalue() == "café \\udce9\n".encode()


@pytest.mark.parametrize("locale", ["C", "en_US.ISO-8859-1"])
def test_other_locales(locale):
    variables = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = python("-m", "spalm", "run", "café", "--ouz", "─", env=variables, encoding="utf-8")
    assert found.returncode in (1, 2)
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith("spalm: ")


def test_summaries_of_verbs_are_whole(capsys):
    assert entry.run([]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "..." not in shown.partition("Commands:")[2]
    for name, verb in command.commands.items():
        first = " ".join(verb.help.split()).split(". ")[0]
        assert f"{name} {first}" in shown


def test_names_of_choices_are_those_that_exist(capsys):
    entry.run(["download", "--help"])
    entry.run(["study", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ", ".join(OFFICIAL_CORPORA) in shown
    assert ", ".join(ANALYSES) in shown


@pytest.fixture
def memory(tmp_path):
    """A memory in which a document has a name that a terminal would obey."""
    encoder = StubEncoder()
    made, text = new_memory(tmp_path / "memory", encoder), stream({ESCAPES: [1, 2, 3], "plain": [4, 5]})
    remember(made, encoder, text, source=source_of_text(text))
    return made


def test_names_reach_no_terminal_raw(memory, capsys):
    for verb, *options in (["show", "--documents"], ["show"], ["forget", "plaim"], ["forget", ESCAPES[1:]]):
        entry.run([verb, str(memory.directory), *options])
    found = capsys.readouterr()
    assert "\\u001b]0;title\\u0007" in found.out
    for printed in (found.out, found.err):
        assert not set(printed) & set("\x1b\x07\x9b\u202e\r")
    listed = [line.split("\t")[2] for line in found.out.splitlines()[:2]]
    assert listed[1] == "plain", "a name stays on its line"


def test_names_in_tables_and_markup_reach_no_terminal_raw():
    terminal = io.StringIO()
    console, table = Console(file=terminal, force_terminal=True, width=200), Table("document")
    table.add_row(Text(ESCAPES, style="red"))
    console.print(table, ESCAPES)
    shown = terminal.getvalue()
    assert "\x1b[31m" in shown, "colours of our own stay"
    assert "\\u001b" in shown
    assert not [sequence for sequence in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e") if sequence in shown]


def test_generated_text_is_as_it_is_in_a_file_and_visible_on_a_terminal(capsys, monkeypatch):
    print_text(ESCAPES)
    assert capsys.readouterr().out == ESCAPES
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_text("a\tb\n\x1b[31m")
    assert capsys.readouterr().out == "a\tb\n\\u001b[31m"


def test_a_document_is_forgotten_once(memory, capsys):
    assert entry.run(["forget", str(memory.directory), "plain", "plain"]) == 0
    assert "forgot 1 document(s)" in capsys.readouterr().err
    assert memory.versions()[-1].what == "forgot 1 document(s)"
