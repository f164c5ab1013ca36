"""A pretrained model with a memory on disk to an explorer of it."""

import numpy as np

from spalm.attachment import Attached
from spalm.corpus import TokenStream
from spalm.generation.explorer import Base, Explorer, Speaker
from spalm.memory import source_of_split
from spalm.runs import HeldOut


def explorer_of(attached: Attached) -> Explorer:
    """Dev and test were remembered after they had been measured: their passages find nothing of their own documents."""
    memory, encoder, search = attached.memory, attached.base.encoder, attached.search
    base = Base("model", attached.base.model, encoder.reading)
    speakers = [Speaker(name, base, combiner) for name, combiner in attached.combiners.items()]

    def find(stream: TokenStream) -> tuple[np.ndarray, np.ndarray]:
        return search.find(encoder.keys(stream, 0, len(stream), memory.keys_of, memory.width))

    def known(split: HeldOut, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first = memory.first_id(source_of_split(attached.corpus, split))
        entries = memory.entries()
        if first is not None and (entries.rows(first + rows) >= 0).all():
            return search.find(entries.take(entries.rows(first + rows)), own=first + rows)
        text = attached.corpus.split(split)  # forgotten since: it can be read again, and is nowhere to be found
        return search.find(encoder.keys(text, int(rows[0]), int(rows[-1]) + 1, memory.keys_of, memory.width))

    title = attached.directory.resolve().name
    return Explorer(title, attached.corpus, memory, lambda *_: speakers, find, known, attached.base.device)
