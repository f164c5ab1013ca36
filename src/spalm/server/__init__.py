"""A model with its memory in, a web server out: OpenAI-style completions, documents, the explorer, health, metrics."""

from spalm.server.app import make_explorer_server, make_server
from spalm.server.http import allowed_hosts, check_access, serve
from spalm.server.limits import Limits

__all__ = ["Limits", "allowed_hosts", "check_access", "make_explorer_server", "make_server", "serve"]
