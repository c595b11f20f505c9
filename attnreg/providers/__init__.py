"""One file per regularizer."""

from attnreg.provider import Compose, OnLayers
from attnreg.providers.adversarial_attention import AdversarialAttention
from attnreg.providers.attention_dropout import AttentionDropout
from attnreg.providers.attention_layerdrop import AttentionLayerDrop
from attnreg.providers.attribution import AttributionProvider
from attnreg.providers.bernoulli_schedule import BernoulliScheduleProvider
from attnreg.providers.concrete_dropout import ConcreteDropout
from attnreg.providers.contextual_dropout import ContextualDropout
from attnreg.providers.cross_tuning import CrossTuning
from attnreg.providers.drop_attention import DropAttention
from attnreg.providers.drop_head import DropHead
from attnreg.providers.drop_key import DropKey
from attnreg.providers.gnet import GNetProvider
from attnreg.providers.head_mask import HeadMask
from attnreg.providers.layerdrop import LayerDrop
from attnreg.providers.learnable_bernoulli import LearnableBernoulli
from attnreg.providers.structural_mask import StructuralMask
from attnreg.providers.token_dropout import TokenDropout
from attnreg.providers.unidrop import UniDrop

__all__ = [
    "AdversarialAttention",
    "AttentionDropout",
    "AttentionLayerDrop",
    "AttributionProvider",
    "BernoulliScheduleProvider",
    "Compose",
    "ConcreteDropout",
    "ContextualDropout",
    "CrossTuning",
    "DropAttention",
    "DropHead",
    "DropKey",
    "GNetProvider",
    "HeadMask",
    "LayerDrop",
    "LearnableBernoulli",
    "OnLayers",
    "StructuralMask",
    "TokenDropout",
    "UniDrop",
]
