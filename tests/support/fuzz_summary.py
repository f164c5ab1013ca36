"""The summary of a fuzz run: how much was tried, and what went wrong, in a JSON file."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

LEAST = {"openapi": 1000, "http": 500, "flips": 600, "hostile_files": 800, "command_lines": 250, "kills": 150}
"""Numbers of inputs of each set that must have been tried."""
COUNTED = ("tracebacks", "hangs", "errors_500", "flips_missed", "outside", "other")
"""Kinds of what may go wrong."""


class Summary:
    """A plugin of pytest that collects what the workers tell, writes it, and fails the run if too little was tried."""

    def __init__(self, path: Path):
        self._path, self._begun = path, time.monotonic()
        self._tallies: list[dict[str, Any]] = []
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collects the tally of a test, which is complete when the test is torn down."""
        if report.failed:
            self._failed.append(f"{report.nodeid} ({report.when})")
        if report.when == "teardown":
            self._tallies += [dict(value) for name, value in report.user_properties if name == "tally"]
            self._write()  # so that a run that is ended from outside leaves what it found

    def as_json(self) -> dict[str, Any]:
        """Returns the content of the file."""
        sets = {name: [each for each in self._tallies if each["what"] == name] for name in LEAST}
        problems = {
            kind: [about for each in self._tallies for about in each["problems"].get(kind, [])] for kind in COUNTED
        }
        return {
            "seconds": round(time.monotonic() - self._begun),
            "tried": {name: sum(each["tried"] for each in found) for name, found in sets.items()},
            "least": LEAST,
            "found": {kind: len(about) for kind, about in problems.items()},
            "slowest": {name: max((each["slowest"] for each in found), default=None) for name, found in sets.items()},
            "failed": self._failed,
            "problems": problems,
        }

    def _write(self) -> dict[str, Any]:
        """Writes the file, and returns its content."""
        content = self.as_json()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(content, indent=2) + "\n")
        return content

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the file; a run that tried too little has failed."""
        content = self._write()
        too_few = [name for name, least in LEAST.items() if content["tried"][name] < least]
        if session.exitstatus == 0 and (too_few or any(content["found"].values())):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the counts."""
        content = self.as_json()
        terminalreporter.write_line(f"tried: {content['tried']}")
        terminalreporter.write_line(f"found: {content['found']}; written to {self._path}")
