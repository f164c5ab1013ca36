"""Rights of keys: which memories the holder of a key may use, and which it may change.

A key with limited rights does not learn which memories there are: what it may not use, and what does not exist, are
refused in the same words.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from spalm.generation import DocumentService, MemorySelection, Model
from spalm.server.errors import RequestRefused

RIGHTS_SCOPE = "spalm.rights"
"""Name under which a request's rights are in its scope."""
_SHOWN = 100
"""Number of characters of a name that are shown."""


@dataclass(frozen=True)
class Rights:
    """What the holder of a key may do."""

    reads: frozenset[str] | None = None
    """Names of the memories that may be used; None: all."""
    changes: frozenset[str] | None = None
    """Names of the memories to which documents may be added, and from which they may be deleted; None: all."""

    def may_read(self, name: str) -> bool:
        """Returns whether a memory may be used."""
        return self.reads is None or name in self.reads

    def may_change(self, name: str) -> bool:
        """Returns whether a memory may be changed."""
        return self.may_read(name) and (self.changes is None or name in self.changes)


ALL_RIGHTS = Rights()
"""Rights where no key is needed, and of the key that may do everything."""


def rights_of(request: Request) -> Rights:
    """Returns the rights of the key with which a request came."""
    return request.scope.get(RIGHTS_SCOPE, ALL_RIGHTS)


GivenRights = Annotated[Rights, Depends(rights_of)]
"""The rights of a request, as an argument of its handler."""


def selected_memories(model: Model, names: Iterable[str] | None, rights: Rights) -> MemorySelection:
    """Returns the memories that a request names, None: all that its key may use; refuses others."""
    known = model.models.memories
    if names is None:
        return known.select(name for name in known.names if rights.may_read(name))
    wanted = list(names)
    for name in wanted:
        _refuse_unless_readable(model, name, rights, param="memories")
    return known.select(wanted)


def readable_documents(model: Model, name: str | None, rights: Rights) -> DocumentService:
    """Returns the documents of a memory, None: of the served directory's own, that a key may use; refuses others."""
    chosen = model.models.memories.own if name is None else name
    _refuse_unless_readable(model, chosen, rights, param="memory")
    return model.memories[chosen]


def changeable_documents(model: Model, name: str | None, rights: Rights) -> DocumentService:
    """Returns the documents of a memory that a key may change; refuses others."""
    found, chosen = readable_documents(model, name, rights), model.models.memories.own if name is None else name
    if not rights.may_change(chosen):
        message = f"this key may use the memory {chosen[:_SHOWN]!r}, but not change it"
        raise RequestRefused(403, message, param="memory", code="permission_denied")
    return found


def _refuse_unless_readable(model: Model, name: str, rights: Rights, *, param: str) -> None:
    names = model.models.memories.names
    if not rights.may_read(name):
        message = f"this key has no right to the memory {name[:_SHOWN]!r}"
        raise RequestRefused(403, message, param=param, code="permission_denied")
    if name not in names:
        message = f"there is no memory {name[:_SHOWN]!r}; this server has {', '.join(map(repr, names))}"
        raise RequestRefused(404, message, param=param, code="memory_not_found")
