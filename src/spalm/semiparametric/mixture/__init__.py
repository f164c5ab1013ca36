"""The adaptive mixture of a base with what the memory retrieves."""
