"""Flipped bits: `spalm verify` finds every one, and other commands meet them with a line or with an answer."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from spalm.digests import SUMS
from spalm.maintenance import verify_directory
from support.attacked import document_of, files_of, flip, flipped, replaced_by_copy, uses_of
from support.fuzzing import Commands, Tally

PARTS = 8


def parts_of(files: list[Path], part: int, count: int) -> list[Path]:
    """Returns the files of a part, a number of times each, so that no file is left out."""
    return files[part :: PARTS if count > 1 else 1] * count


@pytest.mark.slow
@pytest.mark.parametrize("which", ["run_folder", "attached_copy"])
def test_every_flipped_bit_is_found(which, request, random, part, amount, tally: Tally):
    folder = request.getfixturevalue(which)
    whole = verify_directory(folder)
    assert not whole.damaged
    assert not whole.unchecked
    assert "every byte is as it was written" in whole.summary()
    for number, path in enumerate(parts_of(files_of(folder), part, amount(1, 2))):
        inner = folder / "memory" if path.is_relative_to(folder / "memory") else path.parent
        with flipped(path, random, near_start=bool(number % 2)) as what, tally.trying(what):
            if not verify_directory(folder if number % 8 == 0 else inner).damaged:
                tally.note("flips_missed", what)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["run_folder", "attached_copy"])
def test_commands_meet_a_flipped_bit_with_a_line_or_an_answer(
    which, request, random, amount, commands: Commands, tmp_path
):
    """Half of the folders have no lists of digests, as if earlier versions had made them."""
    folder = request.getfixturevalue(which)
    name = document_of(folder)
    (tmp_path / "new.txt").write_text("ka1 lo3 mi4 .\n" * 20)
    for number in range(amount(6, 8)):
        copy = replaced_by_copy(folder, tmp_path / which)
        for path in list(copy.rglob(SUMS)) if number % 2 else []:
            path.unlink()
        path = Path(str(random.choice(np.array(files_of(copy), object))))
        what, uses = flip(path, random, near_start=True), uses_of(copy, random, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of figures that are not finite
            for use in random.choice(len(uses), 3, replace=False).tolist():
                commands.run(uses[use], tmp_path, what)
    shutil.rmtree(tmp_path)
