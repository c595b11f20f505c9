"""Find out what a model's mask arguments say: which tokens are padding, by what they did to attention in a dry run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from attnreg.functional.validity import allowed
from attnreg.injection.discovery.blocks import ModuleCall
from attnreg.injection.discovery.sites import FoundSite

OF_ENCODERS = "attention_mask", "src_key_padding_mask"
OF_DECODERS = "decoder_attention_mask", "tgt_key_padding_mask"
NAMES = *OF_ENCODERS, *OF_DECODERS

#: What True, or a number other than 0, is in a mask; ``"pairs"`` of a mask ``(Q, K)`` for all samples, which holds no
#: padding; ``"other"`` if it is not known
Convention = Literal["token", "padding", "pairs", "other"]


def tokens_in(mask: Tensor, convention: Convention) -> Tensor:
    """Return which tokens are not padding, bool, ``(B, T)``, given a mask of two or more dimensions."""
    is_added = mask.is_floating_point() and (convention == "padding" or mask.dim() > 2)  # to scores
    valid = allowed(mask) if is_added else mask.bool() ^ (convention == "padding")
    return valid if valid.dim() == 2 else valid.flatten(1, -2).any(1)  # which keys any query may attend to


def conventions_of(model: nn.Module, sites: Sequence[FoundSite]) -> dict[tuple[str, int], Convention] | None:
    """Return the convention of each mask that modules around self-attention were given, by name and rank.

    ``None`` for models of transformers, whose names tell it.
    """
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        return None
    found: dict[tuple[str, int], Convention] = {}
    for site in sites:
        tokens = site.sighting.tokens
        if tokens is None or site.info.stack == "cross" or site.parts is not None:
            continue
        for number, call in enumerate(site.sighting.running):
            names = OF_DECODERS if number == 0 and site.info.stack == "decoder" else OF_ENCODERS
            for name, mask in _masks(call).items():
                if mask.dim() < 2 or (number == 0 and name not in names and _masks(call).keys() & {*names}):
                    continue
                convention = _convention(mask, tokens.to(mask.device))
                if convention is not None:
                    key = name, mask.dim()
                    found[key] = convention if found.get(key, convention) == convention else "other"
    return found


def _masks(call: ModuleCall) -> dict[str, Tensor]:
    if hasattr(call.module, "config"):  # of transformers
        return {}
    names = list(inspect.signature(type(call.module).forward).parameters)[1:]
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return {name: given[name] for name in NAMES if isinstance(given.get(name), Tensor)}


def _convention(mask: Tensor, tokens: Tensor) -> Convention | None:
    """Return the convention of a mask, given the keys ``(B, K)`` to which any query attends; ``None`` if unknown."""
    batch, keys = tokens.shape
    if mask.shape[-1] != keys:
        return None  # of other tokens
    if mask.dim() == 2 and mask.shape[0] not in (1, batch):
        return "pairs" if mask.shape[0] == keys else "other"
    either: tuple[Convention, ...] = "token", "padding"
    for convention in either:
        if mask.dim() > 2 and mask.is_floating_point() and convention == "padding":
            break
        read = tokens_in(mask, convention)
        if read.shape[0] in (1, batch) and torch.equal(read.expand(batch, keys), tokens):
            return convention
    return "other"
