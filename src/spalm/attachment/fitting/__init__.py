"""Positions of texts in, a fitted and measured combiner out."""
