"""server.explorer."""
