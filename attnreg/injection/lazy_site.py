"""A site whose valid positions are found when someone asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override

from attnreg.sites import AttentionSite

#: finds the valid positions of some query rows ``(R,)``, or of all (``None``), bool, broadcastable to ``(B, H, R, K)``
FindValid = Callable[[Tensor | None], Tensor | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class LazySite(AttentionSite):
    """An attention site of a kernel that holds nothing of the size of its scores.

    Args:
        find_valid: finds the valid positions.

    Example:
        >>> site = LazySite(shape=(1, 1, 4, 4), find_valid=lambda rows: print("now"))
        >>> site.valid
        now
    """

    find_valid: FindValid = field(repr=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        del self.__dict__["valid"]  # so that the property below is reached

    @functools.cached_property  # type: ignore[misc]  # which a dataclass does not expect
    def valid(self) -> Tensor | None:
        """As in :class:`attnreg.AttentionSite`."""
        return self.find_valid(None)

    @override
    def valid_of(self, queries: Tensor) -> Tensor | None:
        return self.find_valid(queries)
