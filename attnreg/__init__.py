"""Attention regularizers for fine-tuning Transformers."""

from typing import TYPE_CHECKING

from attnreg._lazy import lazy_names

__version__ = "0.1.0.dev0"

_NAMES = {
    "AdversarialAttention": "attnreg.providers.adversarial_attention",
    "AttentionDropout": "attnreg.providers.attention_dropout",
    "AttentionLayerDrop": "attnreg.providers.attention_layerdrop",
    "AttentionSite": "attnreg.masks",
    "AttributionProvider": "attnreg.providers.attribution",
    "BernoulliScheduleProvider": "attnreg.providers.bernoulli_schedule",
    "Compose": "attnreg.provider",
    "ConcreteDropout": "attnreg.providers.concrete_dropout",
    "ContextualDropout": "attnreg.providers.contextual_dropout",
    "CrossTuning": "attnreg.providers.cross_tuning",
    "DropHead": "attnreg.providers.drop_head",
    "DropKey": "attnreg.providers.drop_key",
    "DropAttention": "attnreg.providers.drop_attention",
    "GNetProvider": "attnreg.providers.gnet",
    "HeadMask": "attnreg.providers.head_mask",
    "LearnableBernoulli": "attnreg.providers.learnable_bernoulli",
    "LayerDrop": "attnreg.providers.layerdrop",
    "Mask": "attnreg.masks",
    "MaskProvider": "attnreg.provider",
    "OnLayers": "attnreg.provider",
    "SiteInfo": "attnreg.masks",
    "StructuralMask": "attnreg.providers.structural_mask",
    "TokenDropout": "attnreg.providers.token_dropout",
    "UniDrop": "attnreg.providers.unidrop",
    "attach": "attnreg.injection",
    "detach": "attnreg.injection",
    "functional": "attnreg.functional",
    "integrations": "attnreg.integrations",
    "is_attached": "attnreg.injection",
    "parse_provider": "attnreg.expression",
    "tasks": "attnreg.tasks",
    "training": "attnreg.training",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

if TYPE_CHECKING:
    from attnreg import functional as functional
    from attnreg import integrations as integrations
    from attnreg import tasks as tasks
    from attnreg import training as training
    from attnreg.expression import parse_provider as parse_provider
    from attnreg.injection import attach as attach
    from attnreg.injection import detach as detach
    from attnreg.injection import is_attached as is_attached
    from attnreg.masks import AttentionSite as AttentionSite
    from attnreg.masks import Mask as Mask
    from attnreg.masks import SiteInfo as SiteInfo
    from attnreg.provider import Compose as Compose
    from attnreg.provider import MaskProvider as MaskProvider
    from attnreg.provider import OnLayers as OnLayers
    from attnreg.providers.adversarial_attention import AdversarialAttention as AdversarialAttention
    from attnreg.providers.attention_dropout import AttentionDropout as AttentionDropout
    from attnreg.providers.attention_layerdrop import AttentionLayerDrop as AttentionLayerDrop
    from attnreg.providers.attribution import AttributionProvider as AttributionProvider
    from attnreg.providers.bernoulli_schedule import BernoulliScheduleProvider as BernoulliScheduleProvider
    from attnreg.providers.concrete_dropout import ConcreteDropout as ConcreteDropout
    from attnreg.providers.contextual_dropout import ContextualDropout as ContextualDropout
    from attnreg.providers.cross_tuning import CrossTuning as CrossTuning
    from attnreg.providers.drop_attention import DropAttention as DropAttention
    from attnreg.providers.drop_head import DropHead as DropHead
    from attnreg.providers.drop_key import DropKey as DropKey
    from attnreg.providers.gnet import GNetProvider as GNetProvider
    from attnreg.providers.head_mask import HeadMask as HeadMask
    from attnreg.providers.layerdrop import LayerDrop as LayerDrop
    from attnreg.providers.learnable_bernoulli import LearnableBernoulli as LearnableBernoulli
    from attnreg.providers.structural_mask import StructuralMask as StructuralMask
    from attnreg.providers.token_dropout import TokenDropout as TokenDropout
    from attnreg.providers.unidrop import UniDrop as UniDrop
