"""Ways to continue a prompt, which benchmarks compare: other engines with nothing of ours, and ours."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from spalm.corpus import TokenStream
from spalm.generation import GenerationOptions, Model, Sampling, generate_tokens

PROMPT_TOKENS, TOKENS = 40, 64
"""Numbers of tokens of a prompt and of its continuation."""
WARM_UP = 2
"""Number of prompts of each kind that every system continues before anything is measured."""

System = Callable[[list[int]], int]
"""Continues a prompt and returns the number of tokens that it generated."""


def llama_cpp_alone(path: Path, threads: int) -> System:
    """Returns llama.cpp without anything of ours."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(prompt: list[int]) -> int:
        model.reset()
        answer = model.create_completion(prompt, max_tokens=TOKENS, temperature=0)
        return answer["usage"]["completion_tokens"]  # pyright: ignore[reportIndexIssue, reportArgumentType]

    return generate


def transformers_alone(folder: Path, dtype: Literal["float32", "bfloat16"]) -> System:
    """Returns transformers' own generation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(prompt: list[int]) -> int:
        with torch.inference_mode():
            found = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
        return found.shape[1] - len(prompt)

    return generate


def ours(model: Model, *, use_memory: bool, draft: bool = False) -> System:
    """Returns our generation by one backend."""
    options = GenerationOptions(Sampling(max_tokens=TOKENS), draft=draft)
    return lambda prompt: sum(1 for _ in generate_tokens(model.decoder(use_memory=use_memory), prompt, options))


def continue_prompts(systems: dict[str, System], prompts: list[list[int]]) -> dict[str, list[float]]:
    """Returns each system's tokens per second at every prompt; the systems take turns at each."""
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    for number, prompt in enumerate(prompts):
        for name, generate in systems.items():
            begun = time.perf_counter()
            tokens = generate(prompt)
            if number >= WARM_UP:
                speeds[name].append(tokens / (time.perf_counter() - begun))
    return speeds


def medians(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Returns the median of each system's tokens per second."""
    return {name: statistics.median(found) for name, found in speeds.items()}


def ratio_of_pairs(numerator: list[float], denominator: list[float]) -> dict[str, float]:
    """Returns the median ratio of two systems at the same prompts, with a 95% interval by bootstrap over prompts."""
    ratios = np.array(numerator) / np.array(denominator)
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return {"ratio": float(np.median(ratios)), "low": float(low), "high": float(high)}


def prompts_of(stream: TokenStream, count: int) -> list[list[int]]:
    """Returns the beginnings of documents as prompts."""
    begins = [int(begin) for begin in stream.begins[:count]]
    return [[stream.start, *stream.tokens[begin : begin + PROMPT_TOKENS].tolist()] for begin in begins]
