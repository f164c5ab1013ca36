"""A model with its memory in, a web server out: OpenAI-style completions, documents, the explorer, health, metrics."""

from spalm.server.app import make_explorer_server, make_server
from spalm.server.limits import Limits
from spalm.server.listen import allowed_hosts, serve

__all__ = ["Limits", "allowed_hosts", "make_explorer_server", "make_server", "serve"]
