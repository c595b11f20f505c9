"""A tiny model of every model type that transformers knows, and inputs for it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.sweep import audio, multimodal, text, vision
from tests.sweep.absent import ABSENT
from tests.sweep.classes import model_class
from tests.sweep.inputs import plain_inputs
from tests.sweep.layers import expected
from tests.sweep.shrink import shrink

KINDS = (text, vision, audio, multimodal)
CHANGES = {name: change for kind in KINDS for name, change in kind.CHANGES.items()}
INPUTS = {name: make for kind in KINDS for name, make in kind.INPUTS.items()}
# What transformers' own code is warned of, as arguments of `pytest.mark.filterwarnings`.
WARNINGS = [
    "ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning"  # wavlm gives a mask of each kind
]
# A part of the model that has a forward pass, where the whole of it has none.
PARTS = {"bark": "semantic_config"}


@dataclass(frozen=True)
class Specimen:
    """A model type, and how to run a tiny model of it in training mode.

    Args:
        name: the model type.
        make: builds the model, with nothing random in it and no cache; from the random state of the caller.
        inputs: keyword arguments of one forward pass: two samples (but for the few models that take only one), the
            second of them shorter where the model takes a mask.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], dict[str, Any]]

    @functools.cached_property
    def layers(self):
        """Layers of attention by stack ("encoder": in both directions, "decoder": causal, "cross"); None if unsure."""
        return expected(self.name, configuration(self.name))

    def __str__(self):
        return self.name


def specimens():
    """All that can be built."""
    return [
        Specimen(name, functools.partial(_make, name), INPUTS.get(name, plain_inputs))
        for name in CONFIG_MAPPING_NAMES
        if name not in ABSENT
    ]


def not_built():
    """The other model types, with the reason of each."""
    return {name: reason for name, reason in ABSENT.items() if name in CONFIG_MAPPING_NAMES}


def configuration(model_type):
    config = shrink(CONFIG_MAPPING[model_type](), CHANGES)
    return getattr(config, PARTS.get(model_type, ""), config)


def _make(model_type):
    model = model_class(model_type)(configuration(model_type))
    for parameter in model.parameters():
        if not parameter.isfinite().all():  # some are left as the memory was
            torch.nn.init.normal_(parameter, std=0.02)
    return model
