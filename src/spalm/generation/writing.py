"""An answer for a person at a terminal: its text as it comes, and then its sources."""

from collections.abc import Callable

from spalm.generation.generate import Sampling, Written, generate, spans, until
from spalm.generation.model import Live


def write(
    live: Live, prompt: str, sampling: Sampling, cite: bool, use_memory: bool, show: Callable[[str], object]
) -> list[str]:
    """Gives the answer to `show` piece by piece; returns lines that cite what the memory decided, if that is wanted."""
    written: list[Written] = []
    answer = ""
    for part in until(generate(live, live.tokeniser.prompt(prompt), sampling, cite, use_memory), sampling.stop):
        show(part.text)
        answer += part.text
        written += part.written
    if not cite:
        return []
    lines = []
    for span in spans(written):
        text = answer[span.start : span.end].strip()
        sources = "; ".join(f"{each.document}, token {each.offset:,}" for each in span.sources)
        lines += [f"{text!r} from {sources}"] if text else []
    return lines or ["the memory decided nothing of this"]
