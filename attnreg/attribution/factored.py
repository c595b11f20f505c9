"""Attributions that are computed when someone asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from attnreg import functional
from attnreg.functional.region import Region


@dataclass(frozen=True, eq=False)
class FactoredGradient:
    r"""The gradient with respect to attention weights as the product :math:`(\partial s / \partial O) V^\top`.

    Args:
        output_gradient: ``(B, H, Q, D)``.
        values: V, ``(B, H_kv, K, D)``.
    """

    output_gradient: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, H, Q, K)``."""
        return *self.output_gradient.shape[:-1], self.values.shape[-2]

    def product(self) -> Tensor:
        """Compute the gradient, ``(B, H, Q, K)``."""
        return functional.weights_gradient(self.output_gradient, self.values)

    def region(self, valid: Tensor | None, p: float, region: Region) -> Tensor:
        """Return the candidate region without holding the whole gradient; see :func:`functional.candidate_region`."""
        return functional.factored_region(self.output_gradient, self.values, valid, p, region)


class Attributions(MutableMapping[str, Tensor]):
    """Attributions ``(B, H, Q, K)`` by label; a factored gradient is multiplied out on each access.

    Example:
        >>> import torch
        >>> found = Attributions({"encoder.0": FactoredGradient(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 3, 1))})
        >>> found["encoder.0"].shape
        torch.Size([1, 1, 1, 3])
    """

    def __init__(self, found: Mapping[str, Tensor | FactoredGradient] | None = None) -> None:
        self._found = dict(found or {})

    @override
    def __getitem__(self, label: str) -> Tensor:
        found = self._found[label]
        return found.product() if isinstance(found, FactoredGradient) else found

    @override
    def __setitem__(self, label: str, attribution: Tensor) -> None:
        self._found[label] = attribution

    @override
    def __delitem__(self, label: str) -> None:
        del self._found[label]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    @override
    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Attributions({self.shapes})"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """``(B, H, Q, K)`` of each attribution, without computing it."""
        return {label: tuple(found.shape) for label, found in self._found.items()}

    def region(self, label: str, valid: Tensor | None, p: float, region: Region) -> Tensor:
        """Return the candidate region of an attribution; see :func:`attnreg.functional.candidate_region`."""
        found = self._found[label]
        if isinstance(found, FactoredGradient):
            return found.region(valid, p, region)
        return functional.candidate_region(found, valid, p, region)
