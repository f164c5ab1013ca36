"""Numbers of tokens and bytes as people write and read them."""

import re

from spalm.errors import InputError

_MOST = 1e18
"""Highest number of tokens: counts are held in 64 bits."""
_COUNTS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_count(text: str, option: str = "--tokens") -> float:
    """Returns the number of tokens in a text such as 103M, 1.5G or 1T."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGBT]?)", text.strip())
    number = float(found[1]) * _COUNTS[found[2]] if found else 0
    if not 1 <= number <= _MOST:
        raise InputError(f"{option} {text}: not a number of tokens; give something like 200k, 103M or 1T")
    return number


def format_bytes(size: float) -> str:
    """Returns a size such as 1.5 kB or 3 TB."""
    return _with_unit(size, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def format_count(number: float) -> str:
    """Returns a number such as 103M or 1T."""
    return _with_unit(number, ("", "k", "M", "G", "T", "P", "E")).replace(" ", "")


def _with_unit(number: float, units: tuple[str, ...]) -> str:
    """Returns a number in the unit that leaves less than 1,000 of them; each unit is 1,000 of the one before."""
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {units[-1]}"
