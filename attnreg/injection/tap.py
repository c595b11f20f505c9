"""Modules through which attention weights flow, for attribution to look at or replace them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tap(nn.Module):
    """Attention weights come in and go out; hooks on it, captum's too, see them as this module's output.

    Args:
        replacement: goes out instead of what comes in.
    """

    def __init__(self, replacement: Tensor | None = None) -> None:
        super().__init__()
        self.replacement = replacement

    def forward(self, weights: Tensor) -> Tensor:
        """``(B, H, Q, K)`` in, ``(B, H, Q, K)`` out, with a gradient even where nothing below asks for one."""
        if self.replacement is not None:
            return self.replacement.to(weights.dtype)
        if torch.is_grad_enabled() and not weights.requires_grad:
            return weights.detach().requires_grad_()
        return weights
