"""Checks and limits between a client and the routes: connections, host names, keys, sizes and forms of requests."""

from spalm.server.http.auth import ApiKeyMiddleware, Keys, read_keys
from spalm.server.http.bodies import JsonRoute
from spalm.server.http.guard import GuardMiddleware
from spalm.server.http.hosts import HostMiddleware, allowed_hosts
from spalm.server.http.listen import check_access, serve

__all__ = [
    "ApiKeyMiddleware",
    "GuardMiddleware",
    "HostMiddleware",
    "JsonRoute",
    "Keys",
    "allowed_hosts",
    "check_access",
    "read_keys",
    "serve",
]
