"""The API of Ollama, which many local clients use: /api/generate, /api/chat, /api/tags and the like."""

from spalm.server.ollama.routes import ollama_routes

__all__ = ["ollama_routes"]
