"""Text in, token arrays out: sources, tokenisers, the arrays on disk, and the batches that training reads."""

from spalm.corpus.build import CorpusSettings, build_corpus, tokenise_files
from spalm.corpus.display import token_in_text, visible_token
from spalm.corpus.download import OFFICIAL_CORPORA, download_corpus
from spalm.corpus.segments import Batch, TrainingBatches
from spalm.corpus.sources.text_source import SPLITS, Document, Split, TextSource
from spalm.corpus.tokeniser import Tokeniser, TokeniserSettings
from spalm.corpus.tokens import Corpus, TokenSplit, TokenStream

__all__ = [
    "Batch",
    "Corpus",
    "CorpusSettings",
    "Document",
    "OFFICIAL_CORPORA",
    "SPLITS",
    "Split",
    "TextSource",
    "TokenSplit",
    "TokenStream",
    "Tokeniser",
    "TokeniserSettings",
    "TrainingBatches",
    "build_corpus",
    "download_corpus",
    "token_in_text",
    "tokenise_files",
    "visible_token",
]
