"""The positions that a model allows at its attention: read from its mask when needed, once for layers that share it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from attnreg.functional.seeded import is_traced
from attnreg.functional.validity import allowed
from attnreg.sites import AttentionSite, SiteInfo

#: finds the valid positions of query rows ``(R,)``, or of all (``None``), bool, broadcastable to ``(B, H, R, K)``
FindValid = Callable[[Tensor | None], Tensor | None]


@dataclass(eq=False)
class Allowed:
    """The positions that a model allows, and values that are computed from them once (:meth:`once`)."""

    by_mask: Tensor | None = None  #: what a mask allows, bool, broadcastable to ``(B, H, Q, K)``
    bias: Tensor | None = None  #: float, which the model adds to the scores
    causal: tuple[int, int] | None = None  #: ``(Q, K)``, if query i attends only to the keys up to i
    find: FindValid | None = None  #: instead of the others
    mask: Tensor | None = None  # held, so that no other tensor gets its memory and its id
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False)

    @classmethod
    def of_sdpa(cls, mask: Tensor | None, is_causal: bool, queries: int, keys: int) -> Allowed:
        """Read the mask arguments of torch's fused attention."""
        bias = None if mask is None or mask.dtype == torch.bool else mask
        by_mask = _one_row(mask if bias is None else allowed(bias))
        return cls(by_mask, bias, (queries, keys) if is_causal else None, mask=mask)

    def of_rows(self, device: torch.device, rows: Tensor | None = None) -> Tensor | None:
        """Return the valid positions of query rows, or of all (``None``)."""
        if self.find is not None:
            return self.find(rows)
        valid = self.by_mask
        if rows is not None and valid is not None and valid.dim() > 1 and valid.shape[-2] > 1:
            valid = valid[..., rows, :]
        if self.causal is not None:
            queries, keys = self.causal
            rows = torch.arange(queries, device=device) if rows is None else rows
            seen = torch.arange(keys, device=device) <= rows[:, None]
            valid = seen if valid is None else valid & seen
        return valid

    def valid(self, device: torch.device) -> Tensor | None:
        """Return all valid positions, bool, broadcastable to ``(B, H, Q, K)``; ``None`` means all."""
        if "valid" not in self._known:
            self._known["valid"] = self.of_rows(device)
        valid: Tensor | None = self._known["valid"]
        return valid

    def shut_bias(self, device: torch.device) -> Tensor | None:
        """Return the bias with minus infinity where a position is forbidden; ``None`` without a bias.

        A row without a valid key attends by its finite biases, as in the model. They are raised until the highest is
        0, which changes no weight: scores that are added to finfo.min would be lost.
        """
        bias: Tensor | None = self.once("shut bias", lambda: self._find_shut_bias(device))
        return bias

    def _find_shut_bias(self, device: torch.device) -> Tensor | None:
        bias = self.bias
        valid = None if bias is None else self.valid(device)
        if bias is None or valid is None:
            return bias
        highest = bias.amax(-1, keepdim=True)
        raised = bias - highest.masked_fill(highest == -math.inf, 0.0)
        return torch.where(valid, bias, raised.masked_fill(valid.any(-1, keepdim=True), -math.inf))

    def once(self, name: Hashable, find: Callable[[], Any]) -> Any:
        """Return the result of a function, which is called the first time only."""
        if name not in self._known:
            self._known[name] = find()
        return self._known[name]


@dataclass(frozen=True, kw_only=True, eq=False)
class LazySite(AttentionSite):
    """An attention site that reads its valid positions when they are needed."""

    allowed: Allowed = field(repr=False)

    @classmethod
    def of(cls, info: SiteInfo, allowed: Allowed, values: dict[str, Any]) -> LazySite:
        """Make a site of field values, with defaults for the rest; a constructor of 20 fields takes ten times as long.

        There is no ``valid`` among its attributes, so that the property below is reached.
        """
        site = object.__new__(cls)
        attributes = site.__dict__
        attributes |= DEFAULTS
        attributes |= info.__dict__
        attributes |= values
        attributes["allowed"] = allowed
        attributes["heads"] = values["shape"][1]
        if (query := attributes["query"]) is not None:
            attributes["head_size"] = query.shape[-1]
        return site

    @functools.cached_property  # type: ignore[misc]  # which a dataclass does not expect
    def valid(self) -> Tensor | None:
        """As in :class:`attnreg.AttentionSite`."""
        return self.allowed.valid(self.device)

    @override
    def rows(self) -> Tensor | None:
        return None if self._is_causal_alone else super().rows()

    @override
    def number_of_units(self) -> Tensor | int:
        if not self._is_causal_alone:
            return super().number_of_units()
        batch, heads, queries, keys = self.shape
        return batch * heads * sum(min(query + 1, keys) for query in range(queries))

    @property
    def _is_causal_alone(self) -> bool:
        allowed = self.allowed
        return allowed.causal is not None and allowed.by_mask is None and self.queries is None

    @override
    def valid_of(self, queries: Tensor) -> Tensor | None:
        return self.allowed.of_rows(self.device, queries)

    @override
    def once(self, name: Hashable, find: Callable[[], Any]) -> Any:
        kind = "cross" if self.stack == "cross" else "self", self.shape, self.queries is None
        return self.allowed.once((name, *kind), find)


DEFAULTS = {
    item.name: item.default for item in fields(AttentionSite) if item.name != "valid" and item.default is not MISSING
}


def _one_row(valid: Tensor | None) -> Tensor | None:
    """Return valid positions with one row, ``(B, H, 1, K)``, if all query rows are the same."""
    if valid is None or valid.dim() < 2 or valid.shape[-2] == 1:
        return valid
    first = valid[..., :1, :]
    if valid.stride(-2) == 0 or (valid.is_cpu and not is_traced() and bool((valid == first).all())):
        return first
    return valid
