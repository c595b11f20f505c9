"""One file per regularizer."""

from attnreg.provider import Compose, OnLayers
from attnreg.providers.attention_dropout import AttentionDropout
from attnreg.providers.attention_layerdrop import AttentionLayerDrop
from attnreg.providers.bernoulli_schedule import BernoulliScheduleProvider
from attnreg.providers.gnet import GNetProvider

__all__ = [
    "AttentionDropout",
    "AttentionLayerDrop",
    "BernoulliScheduleProvider",
    "Compose",
    "GNetProvider",
    "OnLayers",
]
