"""The two kinds of regularizers to write: of attention, and of hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, get_args

from torch import Tensor
from typing_extensions import override

from attnreg.arguments import one_of
from attnreg.errors import InputError
from attnreg.masks import Mask
from attnreg.regularizer.base import Regularizer, a_mask, states_or_none
from attnreg.sites import AttentionSite, HiddenSite, Where


class MaskProvider(Regularizer):
    """A regularizer of attention: decides, at every attention site, which positions to drop.

    Write only :meth:`forward`; see :class:`attnreg.Regularizer` for everything else.

    Example:
        >>> import torch
        >>> class DropFirstKey(MaskProvider):
        ...     def forward(self, site):
        ...         return Mask(scores=torch.arange(site.shape[-1], device=site.device) > 0)
        >>> DropFirstKey()(AttentionSite(shape=(1, 1, 2, 3))).scores
        tensor([False,  True,  True])
    """

    @abstractmethod
    def forward(self, site: AttentionSite) -> Mask | None:
        """Return the mask for one site; ``None`` keeps everything."""

    def __call__(self, site: AttentionSite, *args: Any) -> Mask | None:
        """Call :meth:`forward`, and check the kind of the site and of the answer."""
        if not isinstance(site, AttentionSite) or args:
            raise _wrong_site(self, "regularizes attention: call it with an AttentionSite, without states", site)
        return a_mask(super().__call__(site), self, site)

    @override
    def mask_at(self, site: AttentionSite) -> Mask | None:
        mask = self(site) if self._forward_hooks or self._forward_pre_hooks else self.forward(site)
        return mask if mask is None or type(mask) is Mask else a_mask(mask, self, site)


class HiddenProvider(Regularizer):
    """A regularizer of hidden states: of embeddings, of the states between blocks, or of the pooled state.

    Write only :meth:`forward`; see :class:`attnreg.Regularizer` for everything else. ``a & b`` composes regularizers of
    both kinds, and :class:`attnreg.OnLayers`, :class:`attnreg.CrossTuning` and :class:`attnreg.Scheduled` take them.

    Example:
        >>> import torch
        >>> class HalveOutputs(HiddenProvider):
        ...     def forward(self, site, states):
        ...         return states / 2
        >>> HalveOutputs()(HiddenSite(shape=(1, 1, 2)), torch.ones(1, 1, 2))
        tensor([[[0.5000, 0.5000]]])
    """

    #: The sites at which it acts: ``"embeddings"``, ``"input"``, ``"output"``, ``"residual"`` or ``"pooled"``, or a
    #: list of these.
    where: Where | Sequence[Where] = "output"

    @abstractmethod
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        """Return the changed states; ``None`` leaves them as they are.

        Args:
            site: where the states are.
            states: ``(B, T, C)``, or ``(B, C)`` for the pooled state; not to be changed in place.
        """

    def __call__(self, site: HiddenSite, *states: Tensor) -> Tensor | None:
        """Call :meth:`forward`, and check the kind of the site and the shape of the answer."""
        if not isinstance(site, HiddenSite) or len(states) != 1:
            raise _wrong_site(self, "regularizes hidden states: call it with a HiddenSite and the states", site)
        return states_or_none(super().__call__(site, *states), self, site, states[0])

    @override
    def states_at(self, site: HiddenSite, states: Tensor) -> Tensor:
        states = super().states_at(site, states) if self._modules else states
        count = len(site._counts)
        answer = self(site, states) if site.where in self.places else None
        # A container may pass on a part of the states, and a kernel has counted its zeros.
        if answer is not None and answer.shape == site.shape and len(site._counts) == count:
            site._zeroed.append((states != 0) & (answer.detach() == 0))
        return states if answer is None else answer.to(states.dtype)

    @property
    def places(self) -> tuple[Where, ...]:
        """The attribute ``where`` as a tuple."""
        return (self.where,) if isinstance(self.where, str) else tuple(self.where)


def checked_where(where: Where | Sequence[Where]) -> Where | Sequence[Where]:
    """Return ``where`` if it is a place of hidden states, or a list of different places."""
    places = (where,) if isinstance(where, str) else where
    if not isinstance(places, (list, tuple)) or not places or len({*map(str, places)}) < len(places):
        raise InputError(f"Expected `where` to be a place or a list of different places, got {where!r}.")
    for place in places:
        one_of("where", place, get_args(Where))
    return where if isinstance(where, str) else list(where)


def _wrong_site(regularizer: Regularizer, usage: str, site: Any) -> InputError:
    return InputError(f"{type(regularizer).__name__} {usage}; got {type(site).__name__}.")
