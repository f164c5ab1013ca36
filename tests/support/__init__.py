"""Parts that several tests share: texts, tiny models, memories without a network, servers."""
