"""Attributions that are computed when someone asks for them."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from attnreg import functional
from attnreg.functional.region import Region


@dataclass(frozen=True, eq=False)
class FactoredGradient:
    r"""The gradient with respect to attention weights as the product :math:`(\partial s / \partial O) V^\top`."""

    output_gradient: Tensor  # (B, H, Q, D)
    values: Tensor  # (B, H_kv, K, D)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, H, Q, K)``."""
        return *self.output_gradient.shape[:-1], self.values.shape[-2]


class Attributions(UserDict[str, Tensor]):
    """Attributions ``(B, H, Q, K)`` by label; a factored gradient is multiplied out on each access.

    Example:
        >>> import torch
        >>> found = Attributions({"encoder.0": FactoredGradient(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 3, 1))})
        >>> found["encoder.0"].shape
        torch.Size([1, 1, 1, 3])
    """

    data: dict[str, Any]  # tensors and factored gradients

    @override
    def __getitem__(self, label: str) -> Tensor:
        found = self.data[label]
        if isinstance(found, FactoredGradient):
            return functional.weights_gradient(found.output_gradient, found.values)
        return found

    @override
    def __repr__(self) -> str:
        return f"Attributions({self.shapes})"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """``(B, H, Q, K)`` of each attribution, without computing it."""
        return {label: tuple(found.shape) for label, found in self.data.items()}

    def region(self, label: str, valid: Tensor | None, p: float, region: Region) -> Tensor:
        """Return the candidate region of an attribution; see :func:`attnreg.functional.candidate_region`."""
        found = self.data[label]
        if isinstance(found, FactoredGradient):
            return functional.factored_region(found.output_gradient, found.values, valid, p, region)
        return functional.candidate_region(found, valid, p, region)
