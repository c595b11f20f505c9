"""The interface of the handle that attached modules use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from attnreg.draws import Draws
from attnreg.injection.backends import Tap
from attnreg.injection.running.padding import Padding
from attnreg.injection.running.rates import DropRates
from attnreg.injection.running.seeds import Place
from attnreg.masks import Mask
from attnreg.regularizer.base import Regularizer
from attnreg.sites import AttentionSite, Site


class Connection(Protocol):
    """The handle, as seen from inside the model; see :class:`attnreg.injection.handle.AttachHandle`."""

    provider: Regularizer
    rates: DropRates
    in_forward: bool
    mode: object  # the mode of the innermost attention module that is running
    taps: dict[str, Tap]
    why_hidden: str

    def acts_on(self, module: nn.Module) -> bool:
        """Whether the provider masks a module that runs now."""

    def padding_at(self, site: Site) -> Padding:
        """Return the padding masks of the pass that computes hidden states now."""

    def draws_at(self, site: Site, place: Place) -> Draws:
        """Return the source of what is drawn now at a place."""

    def asking(self, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Check within the block, in which the provider is asked, that masks that are repeated can be."""

    def note(self, site: AttentionSite, mask: Mask | None) -> None:
        """Record the drop rate of a site."""

    def begin(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str]) -> None:
        """Begin a forward pass of the model."""

    def end(self) -> None:
        """End a forward pass of the model."""

    def begin_again(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str]) -> None:
        """Begin a forward pass that gradient checkpointing repeats; refuse if the first one was not masked."""

    def end_again(self, module: nn.Module) -> None:
        """End a forward pass that gradient checkpointing repeats."""

    def check_entry(self, name: str) -> None:
        """Refuse to mask attention outside a forward pass, if the provider must know when a pass begins."""
