"""From tokens to tokens: reading, predicting with the memory, picking, drafts, and several answers side by side."""
