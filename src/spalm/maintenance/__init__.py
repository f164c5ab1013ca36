"""A directory in: verified byte by byte, without a document that is to be forgotten, or packed into one file."""

from spalm.maintenance.pack import PackedArchive, pack
from spalm.maintenance.receipt import forget_with_receipt
from spalm.maintenance.removal import remove_forgotten
from spalm.maintenance.unpack import unpack
from spalm.maintenance.verify import Verification, verify_directory

__all__ = [
    "PackedArchive",
    "Verification",
    "forget_with_receipt",
    "pack",
    "remove_forgotten",
    "unpack",
    "verify_directory",
]
