"""Part 1: perplexity on held-out documents by domain and by the size of the memory.

For every domain the number of entries with keys grows beside all exact matches, and the number of exact matches grows
beside a fixed number of entries with keys. The documents that are held out are the same in all memories of a domain.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from proof.domains import Domains
from proof.scores import entries_searched, positions_learned_from
from proof.study import SEED, Study
from spalm.attachment import Attached, AttachSettings
from spalm.corpus import Tokeniser
from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser
from spalm.digests import digest_of_file


@dataclass(frozen=True)
class DomainTexts:
    """The files of a domain from which memories are made, and the settings with which they are."""

    name: str
    domains: Domains
    core: Path
    core_tokens: int
    tokeniser: Tokeniser
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings laid over those of the study."""

    @classmethod
    def of(cls, study: Study, name: str, core: int | None = None, **settings: Any) -> "DomainTexts":
        """Writes the core of a domain, or finds it; `core` is its number of tokens, by default that of the study."""
        tokeniser = PretrainedTokeniser.of_model(study.model)
        domains, tokens = Domains(study.data, study.directory / "texts", SEED), core or study.sizes.core
        return cls(name, domains, domains.core(name, tokens, tokeniser), tokens, tokeniser, settings)

    @cached_property
    def digest(self) -> str:
        """Digest of the core, of which everything is made."""
        return digest_of_file(self.core)

    def identity(self, study: Study) -> list[Any]:
        """Returns what everything that is measured with the core alone depends on."""
        return [self.name, self.digest, self.attach_settings(study).as_json()]

    def attach_settings(self, study: Study, **given: Any) -> AttachSettings:
        """Returns the settings of a memory of this domain."""
        return study.settings(**self.settings, **given)

    def memory_name(self, study: Study, keys: int, exact: int) -> str:
        """Returns the name of the memory with so many entries with keys and tokens with exact matches."""
        return f"{self.core.stem}-{keys}-{exact or 'core'}-{self.attach_settings(study).positions}"

    def attach(self, study: Study, keys: int, exact: int) -> tuple[Attached, dict[str, float]]:
        """Returns the model with a memory of this domain, and the time that attaching it took.

        `exact` is the number of tokens with exact matches; 0: those of the core alone.
        """
        library = self.domains.library(self.name, self.core, exact - self.core_tokens, tokeniser=self.tokeniser)
        settings = self.attach_settings(study, keys=keys, library=[] if library is None else [str(library)])
        return study.attach(self.memory_name(study, keys, exact), [self.core], settings)


def sizes_of_curve(study: Study) -> list[tuple[int, int]]:
    """Returns (entries with keys, tokens with exact matches) of every memory of a domain; 0: those of the core."""
    sizes = study.sizes
    exact = [each if each > sizes.core else 0 for each in sizes.exact]
    return list(dict.fromkeys([(keys, max(exact)) for keys in sizes.keys] + [(sizes.core, each) for each in exact]))


def largest_of_curve(study: Study) -> tuple[int, int]:
    """Returns the sizes of the largest memory of a domain."""
    return max(sizes_of_curve(study), key=lambda size: (size[1], size[0]))


def largest_of(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the point of the largest memory of a curve."""
    return max(points, key=lambda point: (point["wanted"]["exact"], point["wanted"]["keys"]))


def point_of_curve(study: Study, texts: DomainTexts, keys: int, *, exact: int) -> dict[str, Any]:
    """Returns the figures of a memory: sums of log p by document of test, and what attaching took."""
    attached, clock = texts.attach(study, keys, exact)
    facts = attached.combiner_artifact.facts
    return {
        "wanted": {"keys": keys, "exact": exact},
        **entries_searched(attached),
        "learned_from": positions_learned_from(attached),
        "documents": facts["documents"]["test"],
        "dev": facts["figures"]["dev"],
        "overlap": facts["overlap"]["test"],
        "clock": clock,
    }


def domain_curve(study: Study, name: str) -> dict[str, Any]:
    """Returns the figures of every memory of a domain, each kept as soon as it is there.

    A memory that was measured is removed from the disk, but for those with which harm and forgetting are measured.
    """
    texts, points, sizes = DomainTexts.of(study, name), [], study.sizes
    needed = {(sizes.core, 0), largest_of_curve(study)} if name == sizes.domains[0] else set()
    for keys, exact in sizes_of_curve(study):
        points.append(
            study.made(
                f"curve-{name}-{keys}-{exact or 'core'}",
                [texts.identity(study), keys, exact],
                lambda keys=keys, exact=exact: point_of_curve(study, texts, keys, exact=exact),
            )
        )
        if (keys, exact) not in needed:
            study.remove(texts.memory_name(study, keys, exact))
    return {"domain": name, "points": points}


def curves(study: Study) -> Iterator[dict[str, Any]]:
    """Yields the curves of all domains so far, after each of them."""
    found = {}
    for name in study.sizes.domains:
        found[name] = domain_curve(study, name)
        yield found
