"""Makes what the tests of compatibility open. To be run with the version that is to stay readable, not with this one:

    git worktree add /tmp/made-by 27c1d7b          # version 0.1.0
    PYTHONPATH=/tmp/made-by/src:tests python tests/compatibility/make.py tests/compatibility/made-by-0.1.0

It leaves an archive (a run of every row with its memory and index, and a tiny pretrained model with a memory attached
to it; texts of made-up words) and, beside it, what that version answered.
"""

import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch

RECIPE = """
title: made by 0.1.0
corpus: {source: {kind: text, path: text}, tokeniser: {kind: words}}
network: {layers: 1, width: 8, heads: 2, head_width: 4, feed_forward: 8}
training:
  steps: 12
  batch_size: 2
  segment_length: 8
  memory_length: 8
  optimiser: {learning_rate: 0.01, warm_up: 2}
  evaluate_every: 6
  seed: 1
neighbours: {count: 3, document: true, held_out: 8}
spalm: {gate: {bias: 0.0}}
adaptive: {passes: 1, batch_size: 64, width: 4, neighbours: 8}
evaluation: {unit: perplexity/token}
"""
FOLDER = "@FOLDER@"
"""Stands in the archive for the folder in which it is unpacked."""
TOKENS = [3, 7, 11, 5, 2, 13, 8, 1, 4, 6]
SMALLER = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 32}


def write_texts() -> None:
    """Texts of made-up words, in which the third word of a line follows from the first two."""
    chance = random.Random(0)
    words = [first + second + third for first in "bdfg" for second in "aeu" for third in "xlt"]
    facts = [chance.sample(words, 3) for _ in range(40)]

    def text() -> str:
        return "".join(" ".join(chance.choice(facts)) + " .\n" for _ in range(25))

    for folder in ("text", "notes"):
        Path(folder).mkdir()
    for split, count in (("train", 8), ("valid", 2), ("test", 2)):
        lines = [{"id": f"{split}-{number}", "text": text()} for number in range(count)]
        Path("text", f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number in range(6):
        Path("notes", f"note-{number}.txt").write_text(text())


def spalm(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "spalm", *arguments], check=True)


def answers() -> dict:
    """What is found and how likely each token of a text is, by the names that version 0.1.0 has for it."""
    from spalm.serving.hugging_face import SpalmForCausalLM

    from spalm.memory import Memory
    from spalm.neighbours import open_searcher

    memory = Memory(Path("run/memory"))
    queries = memory.entries().keys(0, 5).astype(np.float32) + np.float32(0.03)
    ids, distances = open_searcher(memory, Path("run/index"))[0].search(queries, 4)
    found: dict = {"search": {"ids": ids.tolist(), "distances": distances.tolist()}}
    tokens = torch.tensor([TOKENS])
    for name in ("run", "attached"):
        scores = SpalmForCausalLM.from_pretrained(name, device="cpu")(tokens).logits.double().log_softmax(-1)
        found[name] = scores[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].tolist()
    return found


def main(out: Path) -> None:
    from support import tiny_models

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_texts()
        Path("recipe.yaml").write_text(RECIPE)
        spalm("run", "recipe.yaml", "--out", "run", "--threads", "1")
        spalm("index", "run/memory", "--out", "run/index")
        tiny_models.ARCHITECTURES["llama"].update(SMALLER)
        text = "".join(path.read_text() for path in sorted(Path("notes").iterdir()))
        tiny_models.write_model(Path("model"), "llama", text)
        sizes = ["context=32", "stride=24", "neighbours=8", "positions=256", "adaptive.passes=1", "adaptive.width=4"]
        assigned = [part for size in sizes for part in ("--set", size)]
        spalm("attach", "model", "notes", "--out", "attached", "--threads", "1", *assigned)
        out.with_suffix(out.suffix + ".json").write_text(json.dumps(answers(), indent=1) + "\n")
        for path in (Path("attached/attached.json"), Path("attached/corpus/manifest.json")):
            path.write_text(path.read_text().replace(str(Path.cwd()), FOLDER))
        with tarfile.open(f"{out}.tar.xz", "w:xz", preset=9) as archive:
            for name in ("text", "notes", "recipe.yaml", "run", "model", "attached"):
                archive.add(name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
