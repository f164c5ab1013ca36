"""Domains of text, cut by plain criteria: articles of the shared Wikipedia, addresses, Python's standard library.

The first documents of a domain are divided into train, dev and test. The others of the domain come first in the library
of a larger memory; articles on anything else follow, in an order drawn at random.
"""

import gzip
import json
import random
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from footballers import FOOTBALLER
from spalm.corpus import Tokeniser
from spalm.corpus.sources.text_files import PythonStdlib
from spalm.errors import InputError

_BEGINNING = 400
"""Number of characters of an article's beginning in which a criterion is looked for."""
WIKIPEDIA = {
    "footballers": FOOTBALLER,
    "species": re.compile(r"\bspecies of\b|\bgenus\b"),
    "albums": re.compile(r"studio album|\balbum by\b"),
    "films": re.compile(r"\bfilm\b.{0,60}directed by"),
    "battles": re.compile(r"\b(Battle|Siege) of\b"),
    "diseases": re.compile(r"\b(disease|syndrome|disorder|infection)\b"),
}
"""Domains of Wikipedia, by what must occur in the beginning of an article."""
DOMAINS = [*WIKIPEDIA, "sotu", "python"]
"""All domains. An article that two criteria fit is in both domains."""
QUICK_DOMAINS = ["footballers", "species", "albums", "films", "sotu", "python"]
"""Domains of a quick study."""
_LONGEST = 6000
"""Number of characters to which documents of the core are cut: an address or a module would else be most of it."""
_AT_ONCE = 256
"""Number of documents that are tokenised together."""


class Domains:
    """The texts of all domains, written to files that memories are made of."""

    def __init__(self, data: Path, directory: Path, seed: int):
        if not (data / "wikipedia").is_dir() or not (data / "sotu").is_dir():
            raise InputError(f"{data} does not hold wikipedia/ and sotu/; set SPALM_DATA")
        self._data, self._directory, self._seed = data, directory, seed

    @cached_property
    def _articles(self) -> list[str]:
        """All articles of the shared Wikipedia."""
        with gzip.open(self._data / "wikipedia" / "train.txt.gz", "rt", encoding="utf-8") as file:
            return [article.strip() + "\n" for article in re.split(r"\n\n(?== )", file.read())]

    def _others(self, name: str) -> list[str]:
        """Returns the articles outside of a domain, in an order drawn at random."""
        others = [text for text in self._articles if not self._fits(name, text)]
        random.Random(self._seed).shuffle(others)
        return others

    @staticmethod
    def _fits(name: str, article: str) -> bool:
        return name in WIKIPEDIA and WIKIPEDIA[name].search(article[:_BEGINNING]) is not None

    def documents(self, name: str) -> list[str]:
        """Returns the documents of a domain."""
        if name in WIKIPEDIA:
            return [text for text in self._articles if self._fits(name, text)]
        if name == "sotu":
            lines = (self._data / "sotu" / "train.txt").read_text(encoding="utf-8").split("\n")
            found = [line.strip() + "\n" for line in lines if line.strip()]
        elif name == "python":
            files = PythonStdlib(kind="python-stdlib").files()
            found = [path.read_text(encoding="utf-8", errors="replace") for _, path in files]
        else:
            raise InputError(f"there is no domain {name!r}; there are {', '.join(DOMAINS)}")
        random.Random(self._seed).shuffle(found)
        return [text for text in found if text.strip()]

    def core(self, name: str, tokens: int, tokeniser: Tokeniser) -> Path:
        """Returns the file with the first documents of a domain, of about so many tokens."""
        path = self._directory / f"{name}-{tokens}.jsonl"
        if not path.exists():
            self._write(path, take_tokens((text[:_LONGEST] for text in self.documents(name)), tokens, tokeniser))
        return path

    def library(self, name: str, core: Path, tokens: int, *, tokeniser: Tokeniser) -> Path | None:
        """Returns the file with documents of about so many tokens that go with a core; None: with none."""
        if tokens <= 0:
            return None
        path = self._directory / f"{core.stem}-library-{tokens}.jsonl"
        if not path.exists():
            used = {json.loads(line)["text"] for line in core.read_text(encoding="utf-8").splitlines()}
            texts = [text for text in self.documents(name) if text[:_LONGEST] not in used]
            self._write(path, take_tokens([*texts, *self._others(name)], tokens, tokeniser))
        return path

    def held_apart(self, name: str, core: Path, tokens: int, *, tokeniser: Tokeniser) -> list[str]:
        """Returns documents of another domain, of about so many tokens, that a memory of this core does not hold."""
        used = {json.loads(line)["text"] for line in core.read_text(encoding="utf-8").splitlines()}
        texts = (text[:_LONGEST] for text in self.documents(name) if text[:_LONGEST] not in used)
        return list(take_tokens(texts, tokens, tokeniser))

    def _write(self, path: Path, texts: Iterable[str]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"id": f"{number:06d}", "text": text}) + "\n" for number, text in enumerate(texts)]
        whole = path.with_suffix(".unfinished")
        whole.write_text("".join(lines), encoding="utf-8")
        whole.replace(path)


def take_tokens(texts: Iterable[str], tokens: int, tokeniser: Tokeniser) -> list[str]:
    """Returns the first texts that have so many tokens together, the last of them whole; all if they have fewer."""
    found, count = [], 0
    pending = list(texts)
    for start in range(0, len(pending), _AT_ONCE):
        group = pending[start : start + _AT_ONCE]
        for text, ids in zip(group, tokeniser.encode([text.encode() for text in group])):
            if count >= tokens:
                return found
            found.append(text)
            count += len(ids)
    return found
