"""Taps: modules that attention weights pass through, so that attribution can read or replace them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tap(nn.Module):
    """Passes attention weights or their replacement through, so that hooks (captum's too) see them as its output.

    Args:
        replacement: weights ``(B, H, Q, K)`` to return instead.
        at_output: pass the output of a fused kernel through instead of the weights, where there is one, no weights are
            dropped, and one call computes the site. The weights are then never computed.
    """

    def __init__(self, replacement: Tensor | None = None, *, at_output: bool = False) -> None:
        super().__init__()
        self.replacement = replacement
        self.at_output = at_output
        #: V, ``(B, H_kv, K, D)``, if the output passed through; else ``None``
        self.values: Tensor | None = None

    def forward(self, weights: Tensor) -> Tensor:
        """Return the weights ``(B, H, Q, K)``; they require a gradient even if no earlier parameter does."""
        if self.replacement is not None:
            return self.replacement.to(weights.dtype)
        if torch.is_grad_enabled() and not weights.requires_grad:
            return weights.detach().requires_grad_()
        return weights

    def output(self, out: Tensor, values: Tensor) -> Tensor:
        """Pass an output ``(B, H, Q, D)`` through instead of weights, and note the values of its keys."""
        self.values = values.detach()
        return self(out)
