"""Taps: modules that attention weights pass through, so that attribution can read or replace them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tap(nn.Module):
    """Passes attention weights or their replacement through, so that hooks (captum's too) see them as its output."""

    def __init__(self, replacement: Tensor | None = None) -> None:
        super().__init__()
        self.replacement = replacement

    def forward(self, weights: Tensor) -> Tensor:
        """Return the weights ``(B, H, Q, K)``; they require a gradient even if no earlier parameter does."""
        if self.replacement is not None:
            return self.replacement.to(weights.dtype)
        if torch.is_grad_enabled() and not weights.requires_grad:
            return weights.detach().requires_grad_()
        return weights
