"""A frozen pretrained model and texts in, the model with a memory out: examples, learning, search policy, scores."""

from spalm.attachment.attach import attach
from spalm.attachment.attached import ATTACHED_FILE, Attached, is_attached
from spalm.attachment.base import PretrainedBase
from spalm.attachment.score import remember_files, score_files
from spalm.attachment.search_policy import ALWAYS_SEARCH, PolicySettings, SearchPolicy
from spalm.attachment.settings import AttachSettings
from spalm.attachment.table import print_attached

__all__ = [
    "ALWAYS_SEARCH",
    "ATTACHED_FILE",
    "AttachSettings",
    "Attached",
    "PolicySettings",
    "PretrainedBase",
    "SearchPolicy",
    "attach",
    "is_attached",
    "print_attached",
    "remember_files",
    "score_files",
]
