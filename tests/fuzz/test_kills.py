"""Kills at random moments: nothing that was acknowledged is lost or comes back, and a run ends with the same bytes."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from spalm.maintenance import verify_directory
from support.commands import SMALL_SETTINGS, Fork, begun, spalm
from support.fuzzing import PATIENCE, Tally
from support.killed import ENCODER, change_endlessly, problems_of
from support.servers import wait_until
from support.stub_memory import new_memory

PARTS = 5
SAME = ("*.tokens", "*.keys", "*.ids", "*.distances", "model.safetensors")
"""Files of a run that hold no times of day."""


@pytest.mark.slow
def test_a_memory_that_is_changed_while_it_is_killed(random, part, amount, tally: Tally, tmp_path):
    memory, journal = new_memory(tmp_path / "memory", ENCODER).directory, tmp_path / "journal"
    journal.touch()
    for number in range(amount(4, 25)):
        before = journal.stat().st_size
        process = Fork(change_endlessly, memory, journal, 100 * part + number)
        wait_until(lambda before=before: journal.stat().st_size > before, "it did not begin")
        time.sleep(float(random.uniform(0, 0.4)))
        process.kill()
        process.wait()
        with tally.trying(f"kill {number} of part {part}"):
            for problem in problems_of(memory, journal):
                tally.note("other", f"kill {number} of part {part}: {problem}")


@pytest.fixture(scope="module")
def whole(shared) -> Path:
    """A small run up to its neighbours that nobody killed, the texts it was made from, and the seconds that it took."""

    def fill(folder: Path) -> None:
        (folder / "text").mkdir()
        for number in range(8):
            (folder / "text" / f"{number}.txt").write_text(f"the cat {number} sat on a mat near my fire .\n" * 30)
        spalm("--help")  # what it is forked from is loaded
        started = time.monotonic()
        assert run(folder, folder / "run").wait() == 0
        (folder / "seconds").write_text(str(time.monotonic() - started))

    return shared.once("killed-run", fill)


def run(folder: Path, out: Path) -> Fork:
    return begun("neighbours", *SMALL_SETTINGS, f"corpus.source.path={folder / 'text'}", "--out", out, "--threads", 1)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(whole, random, part, amount, tally: Tally, tmp_path):
    seconds, kills, folder = float((whole / "seconds").read_text()), 0, tmp_path / "run"
    while kills < amount(2, 6):
        process = run(whole, folder)
        try:
            process.wait(float(random.uniform(0.1, 0.8)) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        with tally.trying(f"kill {kills} of part {part} of a run"):
            if process.returncode > 0 or "Traceback" in process.errors():
                tally.note("tracebacks", process.errors())
            if folder.exists() and any(folder.rglob("manifest.json")) and (bad := verify_directory(folder).damaged):
                tally.note("other", f"kill {kills} of part {part} of a run: {bad[0]}")
        tally.tried -= process.returncode == 0  # it came to its end before the kill
        if process.returncode == 0:
            compare(tally, whole / "run", folder)
            shutil.rmtree(folder)
    process = run(whole, folder)
    if process.wait(PATIENCE + 10 * seconds) != 0:
        tally.note("tracebacks", process.errors())
    compare(tally, whole / "run", folder)


def compare(tally: Tally, whole: Path, killed: Path) -> None:
    """Notes files of a killed run that are not those of one that nobody killed."""
    for path in sorted(path for pattern in SAME for path in whole.rglob(pattern)):
        other = killed / path.relative_to(whole)
        if not other.exists() or other.read_bytes() != path.read_bytes():
            tally.note("other", f"{path.relative_to(whole)} differs after kills")
