"""neighbours.join."""
