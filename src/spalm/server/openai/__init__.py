"""Requests of OpenAI's clients in, answers in their form out: the part of the server below /v1."""

from spalm.server.openai.chat_template import ChatTemplate
from spalm.server.openai.routes import openai_routes

__all__ = ["ChatTemplate", "openai_routes"]
