"""The log of a server: on standard error, bounded whatever clients do, and without control characters."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spalm.console import visible

_MOST = 60
"""Number of messages in a period."""
_PERIOD = 60.0
"""Seconds of a period."""
_LONGEST = 8000
"""Number of characters of a message that are shown; of longer ones the beginning and the end."""
_LOGGERS = ("uvicorn", "asyncio")


class BoundedLogHandler(logging.Handler):
    """Prints a bounded number of messages in each period, and how many it has left out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._began, self._count = time.monotonic(), 0

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a message, if there is room for it."""
        now = time.monotonic()
        if now - self._began > _PERIOD:
            if self._count > _MOST:
                self._print(f"{self._count - _MOST:,} further messages were left out")
            self._began, self._count = now, 0
        self._count += 1
        if self._count <= _MOST:
            self._print(f"{record.levelname}: {self.format(record)}")

    def _print(self, text: str) -> None:
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]}\n...\n{text[-_LONGEST // 2 :]}"
        print(visible(text, lines=True), file=sys.stderr, flush=True)


@contextmanager
def bounded_log() -> Iterator[None]:
    """Bounds what the server's libraries log."""
    handler, loggers = BoundedLogHandler(), [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before):
            logger.handlers, logger.propagate = handlers, propagate
