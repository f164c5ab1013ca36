"""Requests to the explorer: a passage, and what is switched off in the memory."""

from typing import Annotated

from pydantic import Field

from spalm.errors import InputError
from spalm.generation.inspection import LONGEST_PASSAGE, CorpusPassage, Passage, Switches
from spalm.runs import HeldOut
from spalm.server.http.fields import ClosedForm, Integer, Items, NonNegative


class CorpusPlace(ClosedForm):
    """A passage of the corpus."""

    split: HeldOut
    document: NonNegative
    offset: NonNegative = 0
    length: int = Field(default=400, gt=0, le=LONGEST_PASSAGE)


class PassageRequest(ClosedForm):
    """A passage, either `text` or `place`, and what is switched off in the memory."""

    text: str | None = None
    place: CorpusPlace | None = None
    entries_off: Annotated[Items[Integer], Field(max_length=100_000)] = []
    documents_off: Annotated[Items[Integer], Field(max_length=100_000)] = []

    @property
    def passage(self) -> Passage:
        """The passage; refuses a request with none or with two."""
        if self.text is not None and self.place is None:
            return self.text
        if self.place is not None and self.text is None:
            return CorpusPassage(**self.place.model_dump())
        raise InputError("give either a text or a place in the corpus")

    @property
    def off(self) -> Switches:
        """The entries and documents that are switched off."""
        return Switches(frozenset(self.entries_off), frozenset(self.documents_off))


class TokenRequest(PassageRequest):
    """A passage, and the position of one of its tokens."""

    position: NonNegative
