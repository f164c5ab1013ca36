"""Manifests that somebody else made: refused in a line unless they describe the files beside them."""

import json

import numpy as np
import pytest

from spalm.artifact import Artifact, Stage
from spalm.digests import SUMS
from spalm.errors import InputError


@pytest.fixture
def made(tmp_path):
    def fill(draft):
        draft.write_array("numbers", np.arange(8, dtype=np.int32))
        (draft.directory / "log.jsonl").write_text("a log")
        return {"count": 8}, []

    Stage("numbers", 1, {"a": 1}, {}).make(tmp_path / "x", fill)
    return tmp_path / "x"


def change(folder, *, sums: bool = False, **changes) -> None:
    """Changes a manifest as somebody does who makes one by hand."""
    if not sums:
        (folder / SUMS).unlink()
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


NUMBERS = {"bytes": 32, "sha256": "0" * 64, "dtype": "<i4", "shape": [8]}


@pytest.mark.parametrize(
    "entry",
    [
        {**NUMBERS, "dtype": "|O"},
        {**NUMBERS, "dtype": "|O8", "shape": [4]},
        {**NUMBERS, "dtype": ">i4"},
        {**NUMBERS, "dtype": "<U8"},
        {**NUMBERS, "dtype": "|V32", "shape": [1]},
        {**NUMBERS, "dtype": [["a", "|O"]]},
        {**NUMBERS, "shape": [9]},
        {**NUMBERS, "shape": [-8]},
        {**NUMBERS, "shape": [-2, -4]},
        {**NUMBERS, "shape": [1 << 40, 1 << 40]},
        {**NUMBERS, "shape": 8},
        {**NUMBERS, "shape": [8.0]},
        {**NUMBERS, "shape": None},
        {**NUMBERS, "bytes": "32"},
        {**NUMBERS, "bytes": 33},
        {**NUMBERS, "sha256": "x"},
        {},
        None,
        [],
        "numbers",
    ],
    ids=str,
)
def test_an_array_that_its_file_does_not_hold_is_refused(made, entry):
    change(made, files={"numbers": entry})
    with pytest.raises(InputError, match=r"damaged|bytes") as caught:
        Artifact(made)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../x/numbers", "/etc/hostname", "/dev/zero", "", "..", "a\0b"])
def test_files_elsewhere_are_not_opened(made, name):
    change(made, files={name: {"bytes": 0, "sha256": "0" * 64}})
    with pytest.raises(InputError, match="not the name of a file in the folder"):
        Artifact(made)


@pytest.mark.parametrize("key", ["kind", "version", "settings", "parents", "facts", "files"])
@pytest.mark.parametrize("value", [None, [], "x", [[]]], ids=str)
def test_a_part_of_another_type_is_damage(made, key, value):
    if (key, value) == ("kind", "x"):
        return
    change(made, **{key: value})
    with pytest.raises(InputError, match=r"manifest.json is damaged"):
        Artifact(made)


def test_a_missing_fact_is_damage(made):
    with pytest.raises(InputError, match=r"damaged \(sum is missing\)"):
        Artifact(made).facts["sum"]


def test_a_flipped_bit_in_the_manifest_is_found_when_it_is_opened(made):
    path = made / "manifest.json"
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(InputError, match="damaged"):
            Artifact(made)


def test_what_an_earlier_version_made_has_no_list_of_digests_and_opens(made):
    (made / SUMS).unlink()
    Artifact(made).verify()


@pytest.mark.parametrize("scratch", ['["../../victim"]', '["/etc"]', '[".."]', '[""]', "{}", "[1]", "["])
@pytest.mark.parametrize("cheap", [True, False])
def test_scratch_files_elsewhere_are_not_removed(tmp_path, scratch, cheap):
    victim = tmp_path / "victim"
    victim.mkdir()
    foreign = tmp_path / "e" / "corpus"
    foreign.mkdir(parents=True)
    identity = {"kind": "numbers", "version": 1, "settings": {}, "parents": {}}
    for unfinished in ("{}", "[]", json.dumps(identity)):
        (foreign / "unfinished.json").write_text(unfinished)
        (foreign / "scratch.json").write_text(scratch)
        with pytest.raises(InputError, match=r"damaged|not in"):
            Stage("numbers", 1, {}, {}, cheap=cheap).make(foreign, lambda _: ({}, []))
        assert victim.exists()


def test_a_link_among_what_is_removed_is_removed_itself(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    foreign = tmp_path / "e"
    foreign.mkdir()
    identity = {"kind": "numbers", "version": 1, "settings": {"a": 2}, "parents": {}}
    (foreign / "unfinished.json").write_text(json.dumps(identity))
    (foreign / "work").symlink_to(victim)
    with pytest.raises(InputError, match="leads out of"):
        Stage("numbers", 1, {}, {}, cheap=True).make(foreign, lambda _: ({}, []))
    assert victim.exists()
