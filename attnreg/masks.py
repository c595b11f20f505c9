"""Masks, which regularizers of attention return.

Polarity, here and everywhere in the project: in a boolean mask ``True`` means *kept* (or, for ``valid``, *allowed by
the model*), as in :func:`torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import functional
from attnreg.draws import Drawn


@dataclass(frozen=True, eq=False)
class Mask:
    r"""The action of a regularizer at one attention site. A field that is ``None`` changes nothing.

    Args:
        scores: bool, ``True`` = kept, broadcastable to ``(B, H, Q, K)``: a dropped score becomes :math:`-\infty` before
            the softmax. A 0-d ``False`` drops the whole layer (uniform attention) without computing :math:`QK^\top`.
        weights: bool or float, broadcastable to ``(B, H, Q, K)``: multiplies the attention weights after the softmax.
            It may have a gradient.
        normalized: like ``weights``, but applied before them, and every row is then divided by its sum, so that it sums
            to 1 again. A row whose valid keys are all dropped becomes uniform over them.
        detach_sum: pass no gradient through that sum.
        kept: bool, broadcastable to ``(B, H, Q, K)``: the units that count as kept in drop rates. By default, a unit is
            kept if ``scores`` keeps it and no factor on it is 0; a relaxed mask, with no factor of exactly 0, sets it.
        drawn: like ``scores``, but decided within the kernel; see :meth:`AttentionSite.dropping`.
        drawn_weights: like ``weights``, but decided within the kernel; see :meth:`AttentionSite.dropping_weights`.
        relaxed: float, in ``[0, 1]``, 0-d or broadcastable to ``(B, H, Q, 1)``: the share of a row's weights that is
            spread evenly over its valid keys, except dropped scores, before ``normalized`` and ``weights``.

    Raises:
        TypeError: if a field is no tensor, ``scores`` or ``kept`` not boolean, or ``relaxed`` not a float per row.

    Example:
        >>> a = Mask(scores=torch.tensor([[True, False]]))
        >>> b = Mask(scores=torch.tensor([[True, True]]), weights=torch.tensor(0.5))
        >>> (a & b).scores, (a & b).weights
        (tensor([[ True, False]]), tensor(0.5000))
    """

    scores: Tensor | None = None
    weights: Tensor | None = None
    normalized: Tensor | None = field(default=None, repr=False)
    detach_sum: bool = field(default=False, repr=False)
    kept: Tensor | None = field(default=None, repr=False)
    drawn: tuple[Drawn, ...] = field(default=(), repr=False)
    relaxed: Tensor | None = field(default=None, repr=False)
    drawn_weights: tuple[Drawn, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        fields = self.__dict__
        for name in TENSORS:
            value, decides = fields[name], name in DECISIONS
            if value is not None and not (isinstance(value, Tensor) and (value.dtype == torch.bool or not decides)):
                wanted = "a bool tensor (True = kept; a factor is passed as `weights`)" if decides else "a tensor"
                raise TypeError(f"Expected `{name}` to be {wanted}, got {getattr(value, 'dtype', type(value))}.")
        relaxed = self.relaxed
        if relaxed is not None and (not relaxed.is_floating_point() or (relaxed.dim() and relaxed.shape[-1] != 1)):
            raise TypeError(
                f"Expected `relaxed` to be a float tensor, 0-d or with a last dimension of size 1, got {relaxed.dtype} "
                f"of shape {tuple(relaxed.shape)}."
            )

    @property
    def has_factors(self) -> bool:
        """Whether the mask changes attention weights, after the softmax."""
        factors = self.weights is not None or self.normalized is not None or self.relaxed is not None
        return factors or bool(self.drawn_weights)

    @property
    def has_products(self) -> bool:
        """Whether the mask multiplies attention weights, so that they must be computed."""
        return self.weights is not None or self.normalized is not None or bool(self.drawn_weights)

    @property
    def drops_in_kernel(self) -> bool:
        """Whether a kernel that draws its decisions can apply the whole mask."""
        return self.weights is None and self.normalized is None and self.relaxed is None

    @property
    def is_empty(self) -> bool:
        """Whether the mask changes nothing."""
        if self.drawn or self.drawn_weights:  # torch.compile knows no `not` of a tuple
            return False
        return self.scores is None and not self.has_factors

    def factored(self) -> tuple[Mask, Tensor | None]:
        """Return the mask without the factors that all keys of a row share, and these factors, if there are any.

        Such factors, ``(B, H, Q, 1)`` or ``(B, H, 1, 1)``, multiply the output of attention: :math:`(fA)V = f(AV)`.
        """
        if self.weights is None or self.weights.shape[-1:] not in ((), (1,)):
            return self, None
        rest = Mask(
            self.scores, None, self.normalized, self.detach_sum, self.kept, self.drawn, self.relaxed, self.drawn_weights
        )
        return rest, self.weights

    @property
    def drops_layer(self) -> bool:
        """Whether a 0-d ``False`` drops the whole layer, so that its scores need not be computed.

        It is ``False`` while torch compiles: the decision would become a constant of the compiled code.
        """
        return (
            not self.has_products
            and self.scores is not None
            and self.scores.dim() == 0
            and not torch.compiler.is_compiling()
            and not bool(self.scores)
        )

    @property
    def units_kept(self) -> Tensor | None:
        """The units that drop rates count as kept, bool; ``None`` if the mask drops nothing."""
        if self.kept is not None:
            return self.kept
        written = self.written_out() if self.drawn or self.drawn_weights else self
        kept = written.scores
        for factor in (written.weights, written.normalized):
            if factor is not None:
                kept = factor != 0 if kept is None else kept & (factor != 0)
        return kept

    def written_out(self, dtype: torch.dtype = torch.float32) -> Mask:
        """Return the same mask with all decisions in ``scores`` and ``weights``, the latter of this dtype."""
        if not self.drawn and not self.drawn_weights:
            return self
        scores, weights = self.scores, self.weights
        for drawn in self.drawn:
            scores = drawn.written_out() if scores is None else scores & drawn.written_out()
        for drawn in self.drawn_weights:
            weights = drawn.factors(dtype) if weights is None else weights * drawn.factors(dtype)
        return Mask(scores, weights, self.normalized, self.detach_sum, self.kept, relaxed=self.relaxed)

    def of_weights(self, weights: Tensor, valid: Tensor | None) -> Tensor:
        """Apply the factors of this mask to attention weights.

        Args:
            weights: ``(B, H, Q, K)``, after the softmax.
            valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model.
        """
        if self.drawn or self.drawn_weights:
            return self.written_out(weights.dtype).of_weights(weights, valid)
        if self.relaxed is not None:
            weights = functional.relaxed_weights(weights, self.relaxed, self.scores, valid)
        if self.normalized is not None:
            weights = functional.renormalized(weights, self.normalized, valid, detach_sum=self.detach_sum)
        if self.weights is None:
            return weights
        return weights * (self.weights.to(weights.dtype) if self.weights.is_floating_point() else self.weights)

    def __and__(self, other: Mask) -> Mask:
        """Apply both masks: drop the units that either mask drops, and multiply the factors."""
        mine, theirs = self.__dict__, other.__dict__
        both: dict[str, Any] = {}
        for name in TOGETHER:
            a, b = mine[name], theirs[name]
            both[name] = b if a is None else a if b is None else TOGETHER[name](a, b)
        if self.kept is not None or other.kept is not None:
            a, b = self.units_kept, other.units_kept
            both["kept"] = b if a is None else a if b is None else a & b
        if both["normalized"] is not None:
            both["detach_sum"] = all(mask.detach_sum for mask in (self, other) if mask.normalized is not None)
        drawn, drawn_weights = self.drawn + other.drawn, self.drawn_weights + other.drawn_weights
        return Mask(**both, drawn=drawn, drawn_weights=drawn_weights)


def pack(mask: Tensor) -> list[Tensor]:
    """Pack a bool tensor into bytes, returned with its shape, in which dimensions that were expanded have size 1."""
    for dim in range(mask.dim()):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 and mask.shape[dim] else mask
    bits = mask.flatten().to(torch.uint8)
    bits = F.pad(bits, (0, -len(bits) % 8)).view(-1, 8) << _bit_positions(mask)
    return [bits.sum(1, dtype=torch.uint8), torch.tensor(mask.shape)]


def unpack(packed: list[Tensor]) -> Tensor:
    """Unpack the result of :func:`pack`."""
    values, shape = packed
    bits = (values[:, None] >> _bit_positions(values)) & 1
    return bits.flatten()[: int(shape.prod())].view(shape.tolist()).bool()


def _bit_positions(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


DECISIONS = "scores", "kept"  # the fields that are bool
TENSORS = *DECISIONS, "weights", "normalized", "relaxed"

#: functions that join the fields of two masks
TOGETHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scores": torch.logical_and,
    "weights": torch.mul,
    "normalized": torch.mul,
    "relaxed": lambda a, b: a + b - a * b,
}
