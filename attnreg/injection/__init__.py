"""The injection layer: applies the masks of any provider to the attention of any model."""

from attnreg.injection.attachment import attach, detach, handle_of, is_attached
from attnreg.injection.discovery import Discovery, FoundSite, LeftOut, discover
from attnreg.injection.errors import CoverageWarning, NoAttentionError
from attnreg.injection.handle import AttachHandle

__all__ = [
    "AttachHandle",
    "CoverageWarning",
    "Discovery",
    "FoundSite",
    "LeftOut",
    "NoAttentionError",
    "attach",
    "detach",
    "discover",
    "handle_of",
    "is_attached",
]
