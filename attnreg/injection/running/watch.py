"""Warn if a regularizer cannot act."""

from __future__ import annotations

import warnings

import torch

from attnreg.errors import AsleepWarning
from attnreg.regularizer.abilities import PATIENCE
from attnreg.regularizer.base import Regularizer


class Watch:
    """Counts training passes, and warns once if the provider's schedule, epoch or parameters never change."""

    def __init__(self, provider: Regularizer) -> None:
        self.provider = provider
        self.passes = 0
        self._versions = [(p, p._version) for p in provider.learned_parameters() if p.requires_grad]
        self._warned = False

    def training_pass(self) -> None:
        """Count a training pass, and warn if the provider cannot act."""
        if torch.compiler.is_compiling() or self._warned or self.passes > PATIENCE:
            return
        self.passes += 1
        reason = self._reason()
        if reason is not None:
            self._warned = True
            warnings.warn(reason, AsleepWarning, stacklevel=2)

    def _reason(self) -> str | None:
        for each in self.provider.parts():
            reason = each.why_asleep(self.passes)
            if reason is not None:
                return reason
        stale = [p for p, version in self._versions if p._version == version and p.grad is not None]
        if self.passes >= PATIENCE and self._versions and len(stale) == len(self._versions):
            return (
                f"The learned parameters of {type(self.provider).__name__} have gradients, but have not changed in "
                f"{self.passes} training passes. Add them to the optimizer: "
                '`optimizer.add_param_group({"params": provider.learned_parameters()})`.'
            )
        return None
