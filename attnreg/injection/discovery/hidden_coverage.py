"""Choose the hidden-state sites of a provider, and refuse what a model does not have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from attnreg.errors import InputError
from attnreg.injection.discovery import FoundSite
from attnreg.injection.discovery.hidden import FoundHidden, bare
from attnreg.regularizer.base import MaskProvider
from attnreg.regularizer.hidden import asked_at, hidden_providers
from attnreg.sites import Where

WHY: dict[Where, str] = {
    "embeddings": "They enter the first block of a list of blocks, and count as its layer.",
    "input": "A block is an entry of a ModuleList or Sequential that returns hidden states in their input shape.",
    "output": "A block is an entry of a ModuleList or Sequential that returns hidden states in their input shape.",
    "pooled": "It is the one vector per sample that the last linear layer of the model takes, as in a classifier on "
    "the first token; it counts as the last layer.",
}


def asked_for(
    provider: MaskProvider, found: Sequence[FoundHidden], chosen: Sequence[FoundSite], model: nn.Module
) -> list[FoundHidden]:
    """Return the sites at which any provider inside this one is asked.

    Args:
        provider: the provider.
        found: the hidden-state sites on the chosen layers.
        chosen: the chosen attention sites.
        model: the model.

    Raises:
        InputError: if a provider has no site, if a chosen self-attention has no block around it, or if the dimensions
            of the states are unknown.
    """
    asked = {each.info: asked_at(provider, each.info) for each in found}
    for each in hidden_providers(provider):
        for where in each.places:
            if any(site.where == where and each in leaves for site, leaves in asked.items()):
                continue
            present = ", ".join(dict.fromkeys(site.label for site in asked)) or "none"
            raise InputError(
                f"{type(each).__name__} acts on {where!r}, but {type(model).__name__} has no such hidden states on the "
                f"chosen layers (found: {present}). {WHY[where]}"
            )
    sites = [each for each in found if asked[each.info]]
    without = bare(chosen)
    if without and any(each.block is not None for each in sites):
        raise InputError(
            "A provider of hidden states needs every self-attention to be inside a Transformer block (an entry of a "
            "ModuleList or Sequential that returns hidden states in their input shape). There is no such block around "
            f"{', '.join(without)}: choose others with `modules=...` or `layers=...`."
        )
    for site in sites:
        if not site.axes:
            assert site.block is not None
            raise InputError(
                f"The hidden states of {site.info.name} have the shape {site.block.shape}, of which it is not known "
                "which dimensions are samples and tokens: expected (B, T, C) or (T, B, C)."
            )
    return sites
