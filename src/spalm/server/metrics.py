"""Counters of a server, in the text form that Prometheus reads."""

import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS")


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """Requests by method, route and status."""
        self.prompt_tokens = self.generated_tokens = 0
        self.started = time.time()

    def in_prometheus_form(self, gauges: dict[str, tuple[str, float]]) -> str:
        """Returns all figures as text. `gauges` are further figures: by name, the help text and the value.

        Names that end in _total are counters.
        """
        lines = [
            "# HELP spalm_requests_total Requests by method, route and status; 0: the client left before any.",
            "# TYPE spalm_requests_total counter",
        ]
        for (method, route, status), count in sorted(self.requests.items()):
            lines.append(f'spalm_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}')
        for name, (help_text, value) in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {_number(value)}"]
        return "\n".join(lines) + "\n"


class MetricsMiddleware:
    """Counts requests. Routes are counted by their patterns, as there is no end of names in paths."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            route = getattr(scope.get("route"), "path", "") or "/"
            self._metrics.requests[method, route, status] += 1


def _number(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
