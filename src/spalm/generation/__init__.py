"""generation"""

from spalm.generation.attached_variants import explorer_of
from spalm.generation.explorer import Explorer, Passage, Picked, Switches
from spalm.generation.generate import Sampling
from spalm.generation.model import Live, live_attached, open_live
from spalm.generation.run_variants import open_explorer
from spalm.generation.writing import write

__all__ = [
    "Explorer",
    "Live",
    "Passage",
    "Picked",
    "Sampling",
    "Switches",
    "explorer_of",
    "live_attached",
    "open_explorer",
    "open_live",
    "write",
]
