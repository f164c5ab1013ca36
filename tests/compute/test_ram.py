"""Sizes of memory as users write them."""

import pytest

from spalm.compute import parse_size
from spalm.errors import InputError


@pytest.mark.parametrize(("text", "size"), [("4G", 4 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("99", 99)])
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "four", "4X", "-1G"])
def test_what_is_no_size_is_told(text):
    with pytest.raises(InputError, match=r"--ram .*not a size"):
        parse_size(text)
