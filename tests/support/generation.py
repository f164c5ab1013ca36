"""Tokens generated from a prompt that is tokenised already."""

from collections.abc import Iterator

from spalm.generation import GeneratedToken, GenerationOptions, Model, Sampling, generate_tokens


def generated(
    model: Model, prompt: list[int], sampling: Sampling, *, use_memory: bool = True, cite: bool = False, likely: int = 0
) -> Iterator[GeneratedToken]:
    return generate_tokens(model.decoder(use_memory=use_memory), prompt, GenerationOptions(sampling, cite, likely))
