"""Verification of a memory: every byte is read and compared with the digest that was written with it."""

from pathlib import Path

from spalm.digests import digest_of_own_file
from spalm.errors import DamagedError
from spalm.files import child
from spalm.memory.catalogue import Catalogue
from spalm.memory.shards import NO_KEYS, Shards


def verify_file(path: Path, digest: str, size: int | None = None) -> None:
    """Refuses a file that is missing or does not have this digest; one of another `size` is not read."""
    path = child(path.parent, path.name)
    if not path.is_file() or size not in (None, path.stat().st_size) or digest_of_own_file(path) != digest:
        state = "is damaged (its digest differs)" if path.exists() else "is missing"
        raise DamagedError(f"{path} {state}; restore it from a copy, or remove the memory and remember again")


def verify_shard(catalogue: Catalogue, shards: Shards, shard: int) -> None:
    """Refuses a shard whose files do not have the digests of the catalogue."""
    with catalogue.read() as connection:
        stored = "SELECT keys_sha256, tokens_sha256, entries FROM shards WHERE id = ?"
        keys, tokens, entries = connection.execute(stored, [shard]).fetchone()
    if keys != NO_KEYS:
        verify_file(shards.path("keys", shard), keys, shards.bytes("keys", entries))
    verify_file(shards.path("tokens", shard), tokens, shards.bytes("tokens", entries))


def verify_shards(catalogue: Catalogue, shards: Shards) -> None:
    """Refuses any shard that is damaged."""
    for shard in catalogue.shard_numbers():
        verify_shard(catalogue, shards, shard)
