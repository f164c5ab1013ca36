"""Conversations as prompts: the chat template of a pretrained model."""

from pathlib import Path

from spalm.corpus import Tokeniser
from spalm.errors import InputError, first_line
from spalm.lm.pretrained.import_transformers import open_pretrained
from spalm.server.answers import TokenisedPrompt
from spalm.server.openai.protocol import ChatMessage

_AGAIN = "restore its tokeniser files from a copy, or attach again"
"""Remedy of a damaged tokeniser."""


class ChatTemplate:
    """The chat template of the tokeniser in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            self._tokeniser = open_pretrained("AutoTokenizer", folder)
        except InputError:
            raise
        except Exception as error:  # a damaged file can raise anything
            raise InputError(f"the tokeniser of {folder} cannot be opened ({first_line(error)}); {_AGAIN}") from None
        found = self._tokeniser.chat_template
        given = found.values() if isinstance(found, dict) else [] if found is None else [found]
        if not all(isinstance(template, str) for template in given):
            raise InputError(f"the chat template of {folder} is not a text; {_AGAIN}")

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
        except Exception as error:  # a template is a program, and not ours
            raise InputError(f"messages: the model's chat template refuses them ({first_line(error)})") from None
        tokens = tokeniser.encode([text.encode()])[0].tolist() or [tokeniser.start]
        return TokenisedPrompt(tokens)
