"""Models and a memory in, answers out: the explorer of a memory, its page and its API."""

from spalm.serving.api import make_app
from spalm.serving.explorer import Explorer, Passage, Picked, Switches
from spalm.serving.opened import open_explorer
from spalm.serving.serve import allowed_hosts, serve

__all__ = ["Explorer", "Passage", "Picked", "Switches", "allowed_hosts", "make_app", "open_explorer", "serve"]
