"""Schemathesis against the server's own description in OpenAPI's form, with every check on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from spalm.server import Limits
from support.fuzzing import Tally
from support.servers import TEMPLATE, copied, in_thread, open_attached, server_of

PARTS = 2
LIMITS = Limits(max_tokens=4, answers=4, body_bytes=1 << 16)
SETTINGS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "404", "409", "413", "415", "422", "429"]
"""
"""A description cannot say everything, such as how many tokens a model reads: a good form may still be refused."""


@pytest.fixture
def app(attached_folder, tmp_path) -> FastAPI:
    return server_of(open_attached(copied(attached_folder, tmp_path / "tiny", TEMPLATE)), limits=LIMITS)


def described(app: FastAPI) -> dict[str, Any]:
    """Returns the description of a server, with the one model that it has in place of any name."""
    found = app.openapi()
    for form in found["components"]["schemas"].values():
        if "model" in form.get("properties", {}):
            null = ["null"] if "null" in json.dumps(form["properties"]["model"]) else []
            form["properties"]["model"] = {"type": ["string", *null], "enum": ["tiny", *([None] if null else [])]}
    return found


@pytest.mark.slow
def test_every_check_of_schemathesis(app, part, amount, tally: Tally, tmp_path):
    """The first part tries the borders of every field; the second tries random requests, and requests in a row."""
    (tmp_path / "openapi.json").write_text(json.dumps(described(app)))
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    phases = amount("fuzzing", "coverage" if part == 0 else "fuzzing,stateful")
    report = tmp_path / "report.json"
    with in_thread(app) as address:
        asked = [
            "run",
            "openapi.json",
            "--url",
            address,
            "--checks",
            "all",
            "--phases",
            phases,
            "--seed",
            str(part + 1),
        ]
        asked += [
            "--max-examples",
            str(amount(2, 12)),
            "--request-timeout",
            "120",
            "--continue-on-failure",
            "--no-color",
        ]
        asked += ["--suppress-health-check", "all", "--report", "json", "--report-json-path", str(report)]
        command = [sys.executable, "-m", "schemathesis.cli", *asked]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    said = json.loads(report.read_text()) if report.exists() else {"test_cases": {"generated": 0}, "failures": []}
    tally.tried += said["test_cases"]["generated"]
    for failure in said["failures"]:
        kind = "errors_500" if failure["type"] == "ServerError" else "other"
        tally.note(kind, f"{failure['title']}: {failure['operations']}\n{found.stdout[-20_000:]}")
    if found.returncode and not said["failures"]:
        tally.note("other", found.stdout[-4000:] + found.stderr[-4000:])
    assert Path(report).exists(), found.stdout + found.stderr
