"""Names that users choose from. The command line shows them before any numerical library is loaded."""

from typing import Literal

CORPORA = ("wikitext-103", "wikitext-2", "enwik8")
"""Names of the corpora that can be downloaded."""
EngineName = Literal["local", "ray"]
"""Name of an engine: the threads of this machine, or a Ray cluster."""
BackendName = Literal["auto", "torch", "llama"]
"""Name of what runs a pretrained model."""
PrecisionName = Literal["auto", "float32", "bfloat16"]
"""Name of the precision in which torch runs a pretrained model."""
IndexKind = Literal["exact", "faiss", "disk", "scann"]
"""Name of a kind of index."""
MetricName = Literal["l2", "ip", "cosine"]
"""Name of a metric by which vectors are near each other."""
NetworkName = Literal[
    "transformer", "transformer-xl", "spalm", "transformer-xl-restarted", "spalm-literal", "spalm-extended"
]
"""Name of a network that a run trains."""
RowName = Literal[
    "transformer",
    "transformer-overlap",
    "transformer-xl",
    "transformer-xl-restarted",
    "knn-lm-literal",
    "knn-lm",
    "spalm-literal",
    "spalm",
    "spalm+knn",
    "spalm-extended",
    "spalm-adaptive",
    "nearest",
    "exact",
    "adaptive",
]
"""Name of a row of the results."""
HeldOut = Literal["dev", "test"]
"""Name of a split on which rows are scored."""
ANALYSIS_NAMES = (
    *("strips", "outputs", "gates", "heatmap", "neighbours", "strength", "matches"),
    *("overlap", "significance", "position", "frequency", "ablation", "curves"),
)
"""Names of the analyses of a finished run, in the order of the report."""
LEAST_SPAN = 6
"""Number of tokens of the shortest span that tracing reports by default."""
MOST_PASSAGES = 8
"""Highest number of passages that are put into a prompt."""
LARGEST = 2**31 - 1
"""Highest number that options and fields for counts and places take."""
