"""Tokens in, tokens out: reading, predicting with the memory, picking, drafts, and several answers side by side."""
