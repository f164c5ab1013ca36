"""The bulk join: the neighbours of every position of a corpus, found together, partition by partition."""
