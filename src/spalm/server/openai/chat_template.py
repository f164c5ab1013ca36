"""Conversations as prompts: the chat template of a pretrained model."""

from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from spalm.corpus import Tokeniser
from spalm.errors import InputError
from spalm.lm.pretrained.import_transformers import open_pretrained
from spalm.server.answers import TokenisedPrompt
from spalm.server.openai.protocol import ChatMessage


class ChatTemplate:
    """The chat template of the tokeniser in a folder, loaded when it is first used."""

    def __init__(self, folder: Path):
        self._folder = folder

    @cached_property
    def _tokeniser(self) -> Any:
        return open_pretrained("AutoTokenizer", self._folder)

    @property
    def exists(self) -> bool:
        """Whether the tokeniser has a chat template."""
        return self._tokeniser.chat_template is not None

    def prompt(self, tokeniser: Tokeniser, messages: list[ChatMessage]) -> TokenisedPrompt:
        """Returns the conversation as a prompt that ends where the model is to answer."""
        if not self.exists:
            raise InputError(f"{self._folder.resolve().name} has no chat template; use /v1/completions")
        given = [{"role": message.role, "content": message.text} for message in messages]
        try:
            text = self._tokeniser.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InputError(f"messages: the model's chat template refuses them ({error})") from None
        tokens = tokeniser.encode([text.encode()])[0].tolist() or [tokeniser.start]
        return TokenisedPrompt(tokens)
