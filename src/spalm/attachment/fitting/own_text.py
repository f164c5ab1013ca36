"""Text that the pretrained model writes by itself, from which the mixture learns where the memory has no part.

A mixture that learned from the memory's domain alone has not seen anything else, and mixes the memory in there too.
What a model writes by itself, drawn from its own probabilities, is of all that it was trained on, and no weighting of
a memory can predict it better than the model does. So no other text is needed to learn to leave it alone.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spalm.attachment.base import PretrainedBase
from spalm.console import bar
from spalm.corpus import TokenStream
from spalm.lm import BatchReader
from spalm.lm.pretrained import LlamaModel, PretrainedModel

_LANES, _LENGTH = 32, 96
"""Number of texts that are written side by side, and the number of tokens of each."""


@torch.inference_mode()
def write_own_text(
    base: PretrainedBase, tokens: int, *, start: int, seed: int
) -> tuple[TokenStream, Float[Tensor, "n width"]]:
    """Returns texts that the model writes, of about so many tokens together, and the hidden state of every position.

    The first token of a text is drawn at random, all others from the model's probabilities.
    """
    model, random = base.model, torch.Generator().manual_seed(seed)
    longest = min(_LENGTH, tokens, base.context, model.context_length or _LENGTH)
    count = -(-tokens // longest)
    # Side by side, llama.cpp would need room for texts as long as it can read.
    lanes = 1 if isinstance(model, LlamaModel) else min(_LANES, count)
    written, states = [], []
    with bar("write text to learn where the memory has no part", count * longest) as shown:
        for first in range(0, count, lanes):
            texts, hidden = _write(model, min(lanes, count - first), longest, start=start, random=random)
            written.append(texts.reshape(-1))
            states.append(hidden.flatten(0, 1))
            shown.advance(texts.numel())
    ends = np.arange(1, count + 1) * longest
    stream = TokenStream(torch.cat(written).numpy(), ends, lambda: ["written"] * count, start=start)
    return stream, torch.cat(states)


def _write(
    model: PretrainedModel | LlamaModel, lanes: int, length: int, *, start: int, random: torch.Generator
) -> tuple[Tensor, Float[Tensor, "lanes length width"]]:
    """Returns texts of one length that are written side by side, and their hidden states.

    The first token of each is any of the vocabulary: a model of conversations would begin them all in the same way.
    """
    batches = model if isinstance(model, BatchReader) else None
    if batches is not None:
        batches.reserve(lanes)
    states: list[Any] = [model.empty_state(0, 0) for _ in range(1 if batches is None else lanes)]  # of the model
    last, texts, hidden = torch.full((lanes,), start), [], []
    firsts = torch.randint(model.vocabulary, (lanes,), generator=random)
    for place in range(length):
        if batches is None:
            read = model.hidden(last[:, None].to(model.device), states[0])[:, 0]
        else:
            outputs = batches.read([(state, [token]) for state, token in zip(states, last.tolist())])
            read = torch.cat([output.hidden for output in outputs])
        if place:
            probabilities = model.log_probabilities(read).exp().cpu()
            last = torch.multinomial(probabilities, 1, generator=random)[:, 0]
        else:
            last = firsts
        texts.append(last)
        hidden.append(read.float().cpu())
    if batches is not None:
        batches.reserve(1)
    return torch.stack(texts, 1), torch.stack(hidden, 1)
