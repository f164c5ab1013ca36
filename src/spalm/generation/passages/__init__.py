"""A memory's documents and a question in, the paragraphs that answer it best out, and a prompt that holds them."""

from spalm.generation.passages.bm25 import Bm25Index, Bm25Settings, words_of
from spalm.generation.passages.paragraphs import ParagraphSplitter
from spalm.generation.passages.prompts import fit_passages, message_with_passages, text_with_passages
from spalm.generation.passages.ranking import PassageIndex, RankedPassage, refuse_passage_count

__all__ = [
    "Bm25Index",
    "Bm25Settings",
    "ParagraphSplitter",
    "PassageIndex",
    "RankedPassage",
    "fit_passages",
    "message_with_passages",
    "refuse_passage_count",
    "text_with_passages",
    "words_of",
]
