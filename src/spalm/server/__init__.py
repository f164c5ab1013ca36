"""A model with its memory in, a web server out: OpenAI-style completions, documents, the explorer, health, metrics."""

from spalm.server.app import make_explorer_server, make_server
from spalm.server.http import Keys, allowed_hosts, check_access, read_keys, serve
from spalm.server.limits import Limits

__all__ = [
    "Keys",
    "Limits",
    "allowed_hosts",
    "check_access",
    "make_explorer_server",
    "make_server",
    "read_keys",
    "serve",
]
