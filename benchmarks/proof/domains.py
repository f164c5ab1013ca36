"""Domains of text, cut by plain criteria: articles of the shared Wikipedia, addresses, Python's standard library.

The first documents of a domain are divided into train, dev and test. The others of the domain come first in the library
of a larger memory; articles on anything else follow, in an order drawn at random. Beside the domains there are texts of
other collections, which no memory holds.
"""

import gzip
import html
import json
import random
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from footballers import FOOTBALLER
from proof.study import VERSION
from spalm.corpus import Tokeniser
from spalm.corpus.sources.text_files import PythonStdlib
from spalm.digests import digest_of_json
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
STUDIED = ["footballers", "species", "python", "sotu", "albums", "films"]
"""Domains that have curves by default; the first ones are those beside LoRA and RAG."""
COLLECTIONS = ["wikitext-2", "enwik8-prefix"]
"""Collections of which no memory is made."""
_LONGEST = 2400
"""Number of characters to which documents of the core are cut: the model reads such a document at once, and there are
enough of them for intervals over documents."""
_SHORT = 1500
"""Number of characters to which texts are cut that have nothing to do with a memory."""
_RESERVED, _RESERVED_SHARE = 40, 5
"""Number of articles of each domain that no memory holds; where a domain is small, one of so many articles."""
_WIKITEXT_TITLE = re.compile(r"^ = [^=].* = $", re.MULTILINE)
_ENWIK8_TEXT = re.compile(r"<text xml:space=\"preserve\">(?!#REDIRECT)([^<]*)</text>", re.IGNORECASE)
_AT_ONCE = 256
"""Number of documents that are tokenised together."""


class Domains:
    """The texts of all domains, written to files that memories are made of."""

    def __init__(self, data: Path, directory: Path, seed: int):
        if not (data / "wikipedia").is_dir() or not (data / "sotu").is_dir():
            raise InputError(f"{data} does not hold wikipedia/ and sotu/; set SPALM_DATA")
        self._data, self._directory, self._seed = data, directory, seed

    @cached_property
    def _divided(self) -> tuple[list[str], dict[str, list[str]]]:
        """The articles of the shared Wikipedia from which memories are made, and those of each domain that none has."""
        with gzip.open(self._data / "wikipedia" / "train.txt.gz", "rt", encoding="utf-8") as file:
            articles = [article.strip() + "\n" for article in re.split(r"\n\n(?== )", file.read())]
        reserved = {}
        for name in WIKIPEDIA:
            fitting = [article for article in articles if self._fits(name, article)]
            random.Random(self._seed).shuffle(fitting)
            reserved[name] = fitting[: min(_RESERVED, -(-len(fitting) // _RESERVED_SHARE))]
        used = {article for each in reserved.values() for article in each}
        return [article for article in articles if article not in used], reserved

    @property
    def _articles(self) -> list[str]:
        """The articles from which memories are made."""
        return self._divided[0]

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
        made_of = digest_of_json([VERSION, self._seed, _LONGEST, WIKIPEDIA[name].pattern if name in WIKIPEDIA else ""])
        path = self._directory / f"{name}-{tokens}-{made_of[:8]}.jsonl"
        if not path.exists():
            self._write(path, take_tokens((text[:_LONGEST] for text in self.documents(name)), tokens, tokeniser))
        return path

    def library(self, name: str, core: Path, tokens: int, *, tokeniser: Tokeniser) -> Path | None:
        """Returns the file with documents of about so many tokens that go with a core; None: with none."""
        if tokens <= 0:
            return None
        path = self._directory / f"{core.stem}-library-{tokens}.jsonl"
        if not path.exists():
            self._write(path, take_tokens([*self._left(name, core), *self._others(name)], tokens, tokeniser))
        return path

    def _left(self, name: str, core: Path) -> list[str]:
        """Returns the documents of a domain that are not in its core."""
        used = {json.loads(line)["text"] for line in core.read_text(encoding="utf-8").splitlines()}
        return [text for text in self.documents(name) if text[:_LONGEST] not in used]

    def held_apart(self, name: str, core: Path, count: int) -> list[str]:
        """Returns the beginnings of so many documents of a domain that a memory of its core alone does not hold."""
        return [text[:_SHORT] for text in self._left(name, core)[:count]]

    def unrelated(self, name: str, tokens: int, tokeniser: Tokeniser) -> list[str]:
        """Returns beginnings of documents of a domain or collection, of about so many tokens together.

        No memory of another domain holds them, however large its library is.
        """
        if name in COLLECTIONS:
            texts = self._collection(name)
        elif name in WIKIPEDIA:
            texts = self._divided[1][name]
        else:
            texts = self.documents(name)
        return take_tokens((text[:_SHORT] for text in texts), tokens, tokeniser)

    def _collection(self, name: str) -> list[str]:
        """Returns the documents of a collection, in an order drawn at random."""
        file = {"wikitext-2": "wiki.test.tokens", "enwik8-prefix": "enwik8.head"}[name]
        path = self._data / name / file
        if not path.exists():
            raise InputError(f"there is no {path}; put the file there, or leave this part out")
        text = path.read_text(encoding="utf-8", errors="replace")
        if name == "wikitext-2":
            found = _WIKITEXT_TITLE.split(text)
        else:
            found = [html.unescape(each) for each in _ENWIK8_TEXT.findall(text)]
        found = [each.strip() + "\n" for each in found if each.strip()]
        random.Random(self._seed).shuffle(found)
        return found

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
