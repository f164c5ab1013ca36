"""Part 1: perplexity on held-out documents by domain and by the size of the memory.

For every domain the number of entries with keys grows beside all exact matches, and the number of exact matches grows
beside a fixed number of entries with keys. The documents that are held out are the same in all memories of a domain.
"""

from dataclasses import dataclass
from pathlib import Path

from proof.domains import Domains
from proof.scores import entries_searched
from proof.study import SEED, Study
from spalm.attachment import Attached
from spalm.corpus import Tokeniser
from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser


@dataclass(frozen=True)
class DomainTexts:
    """The files of a domain from which memories are made."""

    name: str
    domains: Domains
    core: Path
    core_tokens: int
    tokeniser: Tokeniser

    @classmethod
    def of(cls, study: Study, name: str) -> "DomainTexts":
        """Writes the core of a domain, or finds it."""
        tokeniser = PretrainedTokeniser.of_model(study.model)
        domains = Domains(study.data, study.directory / "texts", SEED)
        core = domains.core(name, study.sizes.core, tokeniser)
        return cls(name, domains, core, study.sizes.core, tokeniser)

    def attach(self, study: Study, keys: int, exact: int | None) -> tuple[Attached, dict[str, float]]:
        """Returns the model with a memory of this domain.

        `exact` is the number of tokens with exact matches; None: those of the training documents.
        """
        library = None
        if exact is not None:
            library = self.domains.library(self.name, self.core, exact - self.core_tokens, tokeniser=self.tokeniser)
        settings = study.settings(keys=keys, library=[] if library is None else [str(library)])
        name = f"{self.name}-{keys}-{'core' if library is None else exact}"
        return study.attach(name, [self.core], settings)


def sizes_of_curve(study: Study) -> list[tuple[int, int]]:
    """Returns (entries with keys, tokens with exact matches) of every memory of a domain."""
    sizes = study.sizes
    most = max(sizes.exact)
    pairs = [(keys, most) for keys in sizes.keys] + [(sizes.beside, exact) for exact in sizes.exact]
    return list(dict.fromkeys(pairs))


def domain_curve(study: Study, name: str) -> dict:
    """Returns the figures of every memory of a domain: sums of log p by document of test, and what attaching took."""
    texts, points = DomainTexts.of(study, name), []
    for keys, exact in sizes_of_curve(study):
        attached, clock = texts.attach(study, keys, exact)
        facts = attached.combiner_artifact.facts
        points.append(
            {
                "wanted": {"keys": keys, "exact": exact},
                **entries_searched(attached),
                "documents": facts["documents"]["test"],
                "dev": facts["figures"]["dev"],
                "overlap": facts["overlap"]["test"],
                "clock": clock,
            }
        )
    return {"domain": name, "points": points}


def curves(study: Study) -> dict:
    """Returns the curves of all domains, each kept as soon as it is there."""
    sizes = study.sizes
    shared = [sizes.of_memory, sizes_of_curve(study)]
    return {
        name: study.made(f"curve-{name}", [name, shared], lambda name=name: domain_curve(study, name))
        for name in sizes.domains
    }
