"""Text in, token arrays out: sources, tokenisers, the arrays on disk, and the streams that training reads."""

from spalm.corpus.build import CorpusSettings, build_corpus, tokenise_files
from spalm.corpus.display import in_text, shown
from spalm.corpus.download import OFFICIAL, download
from spalm.corpus.segments import Batch, Streams
from spalm.corpus.sources.document import SPLITS, Document, Source, Split
from spalm.corpus.tokeniser import Tokeniser, TokeniserSettings
from spalm.corpus.tokens import Corpus, TokenSplit, TokenStream

__all__ = [
    "Batch",
    "Corpus",
    "CorpusSettings",
    "Document",
    "OFFICIAL",
    "SPLITS",
    "Source",
    "Split",
    "Streams",
    "TokenSplit",
    "TokenStream",
    "Tokeniser",
    "TokeniserSettings",
    "build_corpus",
    "download",
    "in_text",
    "shown",
    "tokenise_files",
]
