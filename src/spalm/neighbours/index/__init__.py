"""neighbours.index."""
