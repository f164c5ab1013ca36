"""Host names: those by which a server may be reached, and whether a request comes from a page of another site."""

import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spalm.errors import InputError
from spalm.server.errors import Refusal

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SAME_SITE = ("same-origin", "none")
"""What browsers say of requests from a page of the server itself, or from the user."""
_HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:@/?#\s]+))(:\d*)?")
"""A Host header: an address in brackets or a name, and perhaps a port."""


def plain_host(host: str) -> str:
    """Returns a host as it was given to `--host`, without the brackets of IPv6 addresses; refuses an empty one."""
    if not host.strip():
        raise InputError("--host is empty, which would be every address; give 127.0.0.1, or 0.0.0.0 if you mean all")
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def address_of(host: str, port: int) -> tuple[socket.AddressFamily, tuple]:
    """Returns the family and the address to listen on."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: {getattr(error, 'strerror', None) or error}; give another one") from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a server that listens on `host`."""
    host = plain_host(host)
    return ipaddress.ip_address(str(address_of(host, 0)[1][0]).partition("%")[0]).is_loopback


def allowed_hosts(host: str, names: Iterable[str] = ()) -> list[str]:
    """Returns the host names by which a server that listens on `host` may be reached; `*` stands for any.

    `names` are further ones, such as that of a reverse proxy.
    """
    given = [name.lower() for name in names]
    return [*_LOOPBACK, plain_host(host).lower(), *given] if is_loopback(host) else given or ["*"]


class HostMiddleware:
    """Refuses requests for other host names.

    Otherwise a page elsewhere could reach the server by a name of its own that leads to this machine.
    """

    def __init__(self, app: ASGIApp, hosts: list[str]):
        self._app, self._hosts = app, None if "*" in hosts else {*hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._hosts is not None:
            name = _host_name(Headers(scope=scope).get("host", ""))
            if name not in self._hosts:
                refusal = Refusal(400, "this server is not reached by that host name; see --allow-host")
                await refusal.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _host_name(header: str) -> str | None:
    """Returns the name in a Host header, without port and brackets; None: it is no host."""
    found = _HOST.fullmatch(header.lower())
    return found and (found["address"] or found["name"])


def is_cross_site(headers: Headers) -> bool:
    """Returns whether a browser sent the request for a page of another site, or of another port of this one."""
    if headers.get("sec-fetch-site", _SAME_SITE[0]) not in _SAME_SITE:
        return True
    origin = headers.get("origin")
    return origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower()
