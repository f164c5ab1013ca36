"""corpus.sources."""
