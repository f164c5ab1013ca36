"""server"""

from spalm.server.app import make_server, open_server, server_of
from spalm.server.explorer.routes import make_app
from spalm.server.limits import Limits
from spalm.server.listen import allowed_hosts, serve

__all__ = [
    "Limits",
    "allowed_hosts",
    "make_app",
    "make_server",
    "open_server",
    "serve",
    "server_of",
]
