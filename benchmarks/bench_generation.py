"""Tokens per second while text is generated: llama.cpp, transformers, and ours without memory, with it, with drafts.

    generation.json    by memory and kind of text, the medians of all systems; at the top those in-domain with the
                       smallest memory: llama_cpp_alone, with_memory, with_memory_and_drafts (our best backend each),
                       and generation_ratio: the speed with the memory by that of the same engine with nothing of ours;
                       drafts_by_none: the speed with drafts by that without, with an interval

Every system continues the same prompts, in turn, greedily, by as many tokens; reading the prompt counts. In-domain text
is that of held-out articles on the memory's subject, far text is of another kind (State of the Union addresses). The
first memory is that of bench_attach.py; larger ones are copies of it with noise (vectors), and the one with a library
(exact matches). llama.cpp is llama-cpp-python's own class, on the same file and threads. `perplexity` is that of test
documents by either backend of ours.
"""

import spalm  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench_disk import CopyingEncoder, RepeatedKeys, no_model
from footballers import smollm2, write_texts
from generation_systems import (
    PROMPT_TOKENS,
    TOKENS,
    WARM_UP,
    System,
    continue_prompts,
    llama_cpp_alone,
    medians,
    ours,
    prompts_of,
    ratio_of_pairs,
    transformers_alone,
)
from spalm.attachment import Attached, AttachSettings, attach
from spalm.compute import Execution, Hardware, available_cores
from spalm.console import print_json, say
from spalm.corpus import TokenStream
from spalm.files import write_json
from spalm.generation import Model
from spalm.generation.hugging_face.export import export_for_transformers
from spalm.memory import remember
from spalm.neighbours import IndexSettings, make_searcher
from spalm.planning import parse_count

DOCUMENT = 1000
"""Number of entries of a document of copies."""


def far_prompts(model: Model, data: Path, count: int) -> list[list[int]]:
    """Returns beginnings of paragraphs of addresses as prompts."""
    lines = (data / "sotu" / "train.txt").read_text(encoding="utf-8").splitlines()
    paragraphs = [line for line in lines if len(line) > 300]
    chosen = paragraphs[:: len(paragraphs) // count][:count]
    return [model.tokeniser.prompt(text)[: PROMPT_TOKENS + 1] for text in chosen]


def changed_copy(source: Path, folder: Path, change: Callable[[Attached], None]) -> Path:
    """Returns a copy of an attached directory after a change, which is made only once."""
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source, unfinished)
        change(Attached(unfinished, Hardware()))
        unfinished.rename(folder)
    return folder


def grown(source: Path, folder: Path, entries: int) -> Path:
    """Returns a copy of an attached directory whose memory has copies of its keys with noise, `entries` in all."""
    return changed_copy(source, folder, lambda attached: _add_copies(attached, entries))


def _add_copies(attached: Attached, entries: int) -> None:
    """Adds noisy copies of a memory's keys until it has so many entries, and makes its index again."""
    memory, base = attached.memory, attached.base
    more = entries - len(memory.entries())
    keys = RepeatedKeys(memory, more)
    reading, vocabulary = base.encoder.reading, base.encoder.vocabulary
    about = base.digest, memory.width, vocabulary, reading, no_model, lambda: torch.device("cpu")
    encoder = CopyingEncoder(*about, vectors=keys)
    tokens = np.resize(memory.entries().tokens(0, len(memory.entries())), more)
    ends = np.append(np.arange(DOCUMENT, more, DOCUMENT), more)
    stream = TokenStream(tokens, ends, lambda: [f"copy {end}" for end in ends], start=attached.corpus.tokeniser.start)
    remember(memory, encoder, stream, source={"copies": more})
    shutil.rmtree(attached.directory / "index")
    make_searcher(memory, attached.directory / "index", IndexSettings(kind="faiss", recall=0.95, neighbours=64))


def memories(work: Path, data: Path, sizes: list[str]) -> dict[str, Path]:
    """Returns attached directories by the kind of memory; they are made where they are missing."""
    texts, library = work / "texts", work / "library.jsonl"
    write_texts(texts, library, data, 350)
    found = {"0.1M entries": work / "attached"}
    settings = AttachSettings(memory="both")
    attach(str(smollm2()), [texts], found["0.1M entries"], settings=settings, execution=Execution())
    for size in sizes:
        if size == "library":
            found["30M tokens of exact matches"] = work / "with_library"
            larger = settings.model_copy(update={"library": [str(library)]})
            attach(str(smollm2()), [texts], work / "with_library", settings=larger, execution=Execution())
        else:
            found[f"{size} entries"] = grown(
                work / "attached", work / f"grown-{size}", int(parse_count(size, "--also"))
            )
    for folder in found.values():
        export_for_transformers(Attached(folder, Hardware()))  # the server's tokeniser is among these files
    return found


def systems_of(folder: Path, path: Path, threads: int, *, torch_too: bool) -> tuple[dict[str, System], Model]:
    """Returns the systems, ours with one memory, and a model of ours; those of torch only if they are wanted."""
    backends = ("llama", "torch") if torch_too else ("llama",)
    hardware = {name: spalm.Hardware("cpu", threads, backend=name) for name in backends}
    models = {name: spalm.load(folder, execution=Execution(each)) for name, each in hardware.items()}
    found = {"llama.cpp alone": llama_cpp_alone(path, threads)}
    base = folder / "model"
    if torch_too:
        found["transformers alone, float32"] = transformers_alone(base, "float32")
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            found["transformers alone, bfloat16"] = transformers_alone(base, "bfloat16")
    for name, model in models.items():
        found[f"ours by {name}, without memory"] = ours(model, use_memory=False)
        found[f"ours by {name}, with memory"] = ours(model, use_memory=True)
        found[f"ours by {name}, with memory and drafts"] = ours(model, use_memory=True, draft=True)
    return found, models["llama"]


def without_test(folder: Path, copy: Path) -> Path:
    """Returns a copy of an attached directory whose memory does not hold the test documents, which prompts are from."""

    def forget(attached: Attached) -> None:
        held = set(attached.memory.entries().live_documents.names)
        attached.memory.forget(sorted(held.intersection(attached.corpus.split("test").names)))

    return changed_copy(folder, copy, forget)


def perplexities(folder: Path, threads: int) -> dict[str, float]:
    """Returns the perplexity of the test documents by each backend, with a memory that does not hold them.

    The keys of the memory were made by torch; the queries are each backend's own hidden states.
    """
    found: dict[str, float] = {}
    for backend in ("torch", "llama"):
        model = spalm.load(folder, execution=Execution(spalm.Hardware("cpu", threads, backend=backend)))
        test = model.models.corpus.split("test")
        log_p, log_base = [], []
        for begin, end in zip(test.begins, test.ends):
            score = model.score(model.tokeniser.decode(test.tokens[begin:end].tolist()))
            log_p += [token.log_probability for token in score.tokens]
            log_base += [token.without_memory for token in score.tokens]
        found[f"{backend}, with memory"] = float(np.exp(-np.mean(log_p)))
        found[f"{backend}, without memory"] = float(np.exp(-np.mean(log_base)))
    return found


def best(speeds: dict[str, float], ending: str) -> float:
    """Returns the speed of our better backend."""
    return max(speed for name, speed in speeds.items() if name.startswith("ours") and name.endswith(ending))


def drafts_by_none(speeds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Returns by backend the speed with drafts relative to that without, at the same prompts."""
    ours = "ours by {}, with memory".format
    backends = [name for name in ("llama", "torch") if ours(name) in speeds]
    return {name: ratio_of_pairs(speeds[f"{ours(name)} and drafts"], speeds[ours(name)]) for name in backends}


def generation_ratios(speeds: dict[str, float]) -> dict[str, float]:
    """Returns the speed with the memory relative to that of the same engine with nothing of ours."""
    found = {"llama.cpp": speeds["ours by llama, with memory"] / speeds["llama.cpp alone"]}
    alone = [speed for name, speed in speeds.items() if name.startswith("transformers alone")]
    if alone:
        found["transformers"] = speeds["ours by torch, with memory"] / max(alone)
    return found


def main() -> None:
    """Measures all systems with every memory and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/generation.json"))
    parser.add_argument("--work", type=Path, default=Path("runs/bench/attach"), help="folder of the memories")
    parser.add_argument("--also", nargs="*", default=["library", "1M", "10M"], help="further memories")
    parser.add_argument("--attached", type=Path, help="what `spalm attach` made of SmolLM2, instead of these memories")
    parser.add_argument("--prompts", type=int, default=20, help="number of prompts of each kind")
    parser.add_argument("--llama-only", action="store_true", help="leave out everything by torch")
    given = parser.parse_args()
    data, threads = Path(os.environ["SPALM_DATA"]), available_cores()
    result: dict = {"cores": threads, "tokens": TOKENS, "memories": {}, "drafts_by_none": {}}
    found = {given.attached.name: given.attached} if given.attached else memories(given.work, data, given.also)
    found = {name: without_test(folder, given.work / f"{folder.name}-without-test") for name, folder in found.items()}
    for name, folder in found.items():
        systems, model = systems_of(folder, smollm2(), threads, torch_too=not given.llama_only)
        texts = {
            "in-domain": prompts_of(model.models.corpus.split("test"), given.prompts + WARM_UP),
            "far": far_prompts(model, data, given.prompts + WARM_UP),
        }
        speeds = {kind: continue_prompts(systems, prompts) for kind, prompts in texts.items()}
        result["memories"][name] = {kind: medians(each) for kind, each in speeds.items()}
        result["drafts_by_none"][name] = {kind: drafts_by_none(each) for kind, each in speeds.items()}
        for kind, each in result["memories"][name].items():
            say(f"{name}, {kind}: " + ", ".join(f"{system} {speed:.1f}" for system, speed in each.items()))
        first = next(iter(result["memories"].values()))["in-domain"]
        top = {
            "llama_cpp_alone": first["llama.cpp alone"],
            "with_memory": best(first, "with memory"),
            "with_memory_and_drafts": best(first, "and drafts"),
            "generation_ratio": generation_ratios(first),
        }
        write_json(given.out, {**top, **result})
    if not given.llama_only:
        result["perplexity"] = perplexities(next(iter(found.values())), threads)
        write_json(given.out, {**top, **result})
    print_json({**top, "perplexity": result.get("perplexity")})


if __name__ == "__main__":
    main()
