"""Answers to requests for text, whatever the protocol: jobs in, whole or streamed answers out."""

from spalm.server.answers.jobs import GenerationJob, TokenisedPrompt
from spalm.server.answers.service import AnswerForm, AnswerService
from spalm.server.answers.streaming import STREAMED

__all__ = ["STREAMED", "AnswerForm", "AnswerService", "GenerationJob", "TokenisedPrompt"]
