"""Let a provider change hidden states while an attached model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnreg.injection.connection import Connection
from attnreg.injection.padding import share
from attnreg.injection.shadow import Shadow
from attnreg.regularizer.hidden import changed
from attnreg.sites import HiddenInfo, HiddenSite


class AttachedClassifier(Shadow[HiddenInfo]):
    """Runs a linear layer on the pooled state as the provider changes it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, on changed states if the provider acts."""
        info = self.next()
        if info is None or not self.handle.acts_on(self.module):
            return self.plain(*args, **kwargs)
        self.handle.check_entry(self.name)
        if args:
            return self.plain(changed_states(self.handle, info, args[0], "bc"), *args[1:], **kwargs)
        return self.plain(**{**kwargs, "input": changed_states(self.handle, info, kwargs["input"], "bc")})


def changed_states(
    handle: Connection, info: HiddenInfo, states: Tensor, axes: str, masks: Mapping[str, Any] | None = None
) -> Tensor:
    """Return hidden states as the provider changes them, and record the share of values that it sets to zero.

    Args:
        handle: the connection to the provider.
        info: the site.
        states: the states.
        axes: their dimensions, ``"btc"``, ``"tbc"`` or ``"bc"``.
        masks: the masks that the block is given, by name.
    """
    before = states.transpose(0, 1) if axes == "tbc" else states
    shape = tuple(before.shape)
    valid, unknown = (None, False) if axes == "bc" else handle.padding_at(info).tokens(info.stack, shape, masks)
    valid = None if valid is None else valid.to(states.device)
    site = HiddenSite(
        **vars(info),
        shape=shape,
        valid=valid,
        padding_unknown=unknown,
        draws=handle.draws_at(info, info.where),
        device=states.device,
        dtype=states.dtype,
    )
    with handle.asking(states.device):
        after = changed(handle.provider, site, before)
    with torch.no_grad():  # values that the model's own dropout has set to zero do not count
        present = before != 0
        dropped = present & (after == 0)
        handle.rates.note_states(info, share(dropped.sum(-1), present.sum(-1), valid))
    return after.transpose(0, 1) if axes == "tbc" else after
