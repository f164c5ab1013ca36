"""Vectors of any origin -> the graph of their nearest neighbours, by the bulk join."""
