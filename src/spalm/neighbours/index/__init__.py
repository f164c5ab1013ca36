"""Indexes for live queries (in RAM, on disk, by ScaNN, or none), and the searcher that uses any of them."""
