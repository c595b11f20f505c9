"""Attention regularizers for fine-tuning Transformers."""

from typing import TYPE_CHECKING

from attnreg._lazy import lazy_names

__version__ = "0.1.0.dev0"

_NAMES = {
    "AttentionDropout": "attnreg.providers.attention_dropout",
    "AttentionLayerDrop": "attnreg.providers.attention_layerdrop",
    "AttentionSite": "attnreg.masks",
    "BernoulliScheduleProvider": "attnreg.providers.bernoulli_schedule",
    "Compose": "attnreg.provider",
    "GNetProvider": "attnreg.providers.gnet",
    "Mask": "attnreg.masks",
    "MaskProvider": "attnreg.provider",
    "OnLayers": "attnreg.provider",
    "SiteInfo": "attnreg.masks",
    "attach": "attnreg.injection",
    "detach": "attnreg.injection",
    "functional": "attnreg.functional",
    "is_attached": "attnreg.injection",
    "tasks": "attnreg.tasks",
    "training": "attnreg.training",
}
__all__ = list(_NAMES)  # noqa: PLE0604
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

if TYPE_CHECKING:
    from attnreg import functional, tasks, training
    from attnreg.injection import attach, detach, is_attached
    from attnreg.masks import AttentionSite, Mask, SiteInfo
    from attnreg.provider import Compose, MaskProvider, OnLayers
    from attnreg.providers.attention_dropout import AttentionDropout
    from attnreg.providers.attention_layerdrop import AttentionLayerDrop
    from attnreg.providers.bernoulli_schedule import BernoulliScheduleProvider
    from attnreg.providers.gnet import GNetProvider
