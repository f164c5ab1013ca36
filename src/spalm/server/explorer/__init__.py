"""An explorer in, a web page out: every model's predictions of a passage, with neighbours that can be switched off."""

from spalm.server.explorer.routes import PAGE, explorer_routes

__all__ = ["PAGE", "explorer_routes"]
