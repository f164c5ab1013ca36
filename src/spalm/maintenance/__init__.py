"""A directory in: verified byte by byte, or without a document that is to be forgotten, with a receipt."""

from spalm.maintenance.receipt import forget_with_receipt
from spalm.maintenance.removal import remove_forgotten
from spalm.maintenance.verify import Verification, verify_directory

__all__ = ["Verification", "forget_with_receipt", "remove_forgotten", "verify_directory"]
