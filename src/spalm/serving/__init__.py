"""Models and a memory in, answers out: the explorer of a memory with its page, and the server of a model with one."""

from spalm.serving.api import make_app
from spalm.serving.attached_explorer import explorer_of
from spalm.serving.explorer import Explorer, Passage, Picked, Switches
from spalm.serving.generating import Sampling
from spalm.serving.limits import Limits
from spalm.serving.live import Live, live_attached, open_live
from spalm.serving.opened import open_explorer
from spalm.serving.serve import allowed_hosts, serve
from spalm.serving.server import make_server, open_server, server_of
from spalm.serving.writing import write

__all__ = [
    "Explorer",
    "Limits",
    "Live",
    "Passage",
    "Picked",
    "Sampling",
    "Switches",
    "allowed_hosts",
    "explorer_of",
    "live_attached",
    "make_app",
    "make_server",
    "open_explorer",
    "open_live",
    "open_server",
    "serve",
    "server_of",
    "write",
]
