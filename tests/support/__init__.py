"""Parts that several tests share: texts, tiny models, memories without a network, servers."""

from support.typecheck import checked

__all__ = ["checked"]
