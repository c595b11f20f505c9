"""Attention sites, which mask providers receive, and masks, which they return.

Shapes, here and everywhere in the project: B batch, H heads, Q queries, K keys, D head size, L layers.
Polarity: in a boolean mask ``True`` means *kept* (or, for ``valid``, *allowed by the model*), as in
:func:`torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from attnreg import functional
from attnreg.draws import Drawn, Draws, DrawsHere
from attnreg.errors import InputError

Stack = Literal["encoder", "decoder", "cross"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """Position of an attention or hidden-state site in its model.

    Args:
        name: qualified name of the module, as in ``model.named_modules()``; if several layers share the module, the
            name of its second call ends in ``#2``.
        layer: index of the layer within its stack, from 0.
        num_layers: number of layers in that stack.
        stack: ``"encoder"`` (bidirectional), ``"decoder"`` (causal) or ``"cross"`` (queries and keys come from
            different sequences).
    """

    name: str = "attention"
    layer: int = 0
    num_layers: int = 1
    stack: Stack = "encoder"

    @property
    def label(self) -> str:
        """Short unique name, ``"<stack>.<layer>"``."""
        return f"{self.stack}.{self.layer}"

    def is_among(self, layers: Collection[int]) -> bool:
        """Whether the layer is one of these; negative indices count from the last layer of the stack."""
        return self.layer in layers or self.layer - self.num_layers in layers


@dataclass(frozen=True, kw_only=True)
class SiteInfo(Site):
    """Position and properties of an attention site in its model.

    Args:
        name: as in :class:`Site`, as are ``layer``, ``num_layers`` and ``stack``.
        heads: H, or ``None`` if it is not known before attention is computed.
        head_size: D, or ``None`` if the model exposes only scores, not queries and keys.
        shares_keys: whether all queries of a sample share their keys. If not, each query has its own keys (a local
            layout); B then counts queries, and Q is 1.
        in_parts: whether a forward pass may compute the site in several calls, such as one per image of a batch; the
            provider is then asked for a mask in each.

    Example:
        >>> SiteInfo(name="bert.encoder.layer.3.attention.self", layer=3, num_layers=12).label
        'encoder.3'
    """

    heads: int | None = None
    head_size: int | None = None
    shares_keys: bool = True
    in_parts: bool = False

    @property
    def shows_queries(self) -> bool:
        """Whether the model exposes queries and keys."""
        return self.head_size is not None


S = TypeVar("S", bound=Site)


def layer_indices(layers: Sequence[int], where: str) -> list[int]:
    """Return layer indices as a list, or raise if they are not one; messages name the provider ``where``.

    Example:
        >>> layer_indices((0, -1), "OnLayers")
        [0, -1]
    """
    if isinstance(layers, (int, str, Mapping)) or not len(layers):
        raise InputError(f"Expected `layers` of {where} to be a list with at least one index, got {layers!r}.")
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise InputError(f"Expected `layers` of {where} to be whole numbers, got {layers!r}.")
    return list(layers)


def on_layers(sites: Sequence[S], layers: Collection[int], where: str) -> list[S]:
    """Select the sites on some layers; negative indices count from the last. Messages name the caller ``where``.

    Raises:
        InputError: if one of the layers has no site.

    Example:
        >>> sites = [SiteInfo(layer=i, num_layers=3) for i in range(3)]
        >>> [site.label for site in on_layers(sites, [0, -1], "`layers`")]
        ['encoder.0', 'encoder.2']
    """
    chosen = [site for site in sites if site.is_among(layers)]
    reached = {index for site in chosen for index in (site.layer, site.layer - site.num_layers)}
    if missing := sorted(set(layers) - reached):
        raise InputError(
            f"Expected layers among {sorted({site.layer for site in sites})} in {where}, got {missing}: the model has "
            "no such layers, or the arguments of `attach` exclude them."
        )
    return chosen


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSite(SiteInfo, DrawsHere):
    r"""One attention computation, just before it runs.

    Args:
        shape: ``(B, H, Q, K)``, the shape of the attention scores.
        valid: bool, broadcastable to ``shape``: positions that the model itself allows (padding, causality); ``None``
            means all.
        query: ``(B, H, Q, D)``, or ``None`` if the model exposes only scores.
        key: ``(B, H_kv, K, D)`` (fewer heads under grouped-query attention), or ``None``.
        bias: float, broadcastable to ``shape``, which the model adds to the scores, or ``None``.
        scale: factor on :math:`QK^\top`; ``None`` means :math:`1/\sqrt D`.
        written_scores: ``(B, H, Q, K)``, the scores, if the model computes them outside of a fused kernel.
        score_mod: score function of ``flex_attention``.
        draws: the source of randomness; see :meth:`keep` and :meth:`uniform`.
        in_kernel: whether the attention kernel can make decisions itself; see :meth:`dropping`.
        device: device of the mask to return.
        dtype: dtype of the attention scores.

    Example:
        >>> valid = torch.tensor([True, True, False]).view(1, 1, 1, 3)
        >>> site = AttentionSite(shape=(1, 2, 3, 3), valid=valid)
        >>> site.units.int()[0, 0]
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 0]], dtype=torch.int32)
    """

    shape: tuple[int, int, int, int]
    valid: Tensor | None = field(default=None, repr=False)
    query: Tensor | None = field(default=None, repr=False)
    key: Tensor | None = field(default=None, repr=False)
    bias: Tensor | None = field(default=None, repr=False)
    scale: float | None = None
    written_scores: Tensor | None = field(default=None, repr=False)
    score_mod: Callable[..., Tensor] | None = field(default=None, repr=False)
    draws: Draws = field(default_factory=Draws, repr=False)
    in_kernel: bool = False
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", self.shape[1])
        if self.query is not None:
            object.__setattr__(self, "head_size", self.query.shape[-1])

    @property
    def units(self) -> Tensor | None:
        """Valid positions of real query rows, bool, broadcastable to ``shape``; ``None`` means every position."""
        if self.valid is None:
            return None
        return functional.units(self.valid, self.shape, self_attention=self.stack != "cross")

    def valid_of(self, queries: Tensor) -> Tensor | None:
        """Return the valid positions of some query rows ``(R,)``, bool, broadcastable to ``(B, H, R, K)``."""
        return None if self.valid is None else self.valid.expand(self.shape)[:, :, queries]

    def dropping(self, p: float | Tensor, shape: tuple[int, int, int, int] | None = None) -> Mask:
        """Return a mask that drops scores independently with probability p; in ``flex_attention``, within the kernel.

        Args:
            p: drop probability; a tensor must be 0-d.
            shape: ``(B, H, Q, K)``, with 1 where positions share a decision (default: that of the scores).
        """
        shape = self.shape if shape is None else shape
        if self.in_kernel:
            return Mask(drawn=(Drawn(self.draws.next_seed(), p, shape, self.device),))
        return Mask(scores=self.keep(p, shape))

    def dropping_weights(self, p: float, *, rescale: bool = True) -> Mask:
        """Return a mask that drops attention weights independently; in ``flex_attention``, within the kernel.

        Args:
            p: drop probability.
            rescale: divide kept weights by 1 - p.
        """
        drawn = Drawn(self.draws.next_seed(), p, self.shape, self.device, rescale)
        return Mask(drawn_weights=(drawn,)) if self.in_kernel else Mask(weights=drawn.factors(self.dtype))

    def scores(self) -> Tensor:
        r"""Compute the scores before the softmax, with scale and bias; :math:`-\infty` where the model forbids.

        Returns:
            ``(B, H, Q, K)``, with gradients.

        Raises:
            InputError: if the site has neither scores nor queries and keys.
        """
        scores = self.written_scores
        if scores is None:
            if self.query is None or self.key is None:
                raise InputError(f"{self.name} has no scores: make it with `written_scores`, or `query` and `key`.")
            key = self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], 1)
            scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
            scores = self.query @ key.transpose(-1, -2) * scale
            scores = scores if self.bias is None else scores + self.bias
            scores = functional.apply_score_mod(self.score_mod, scores)
        return scores if self.valid is None else scores.masked_fill(~self.valid, -torch.inf)


@dataclass(frozen=True, eq=False)
class Mask:
    r"""What a provider does at one attention site. A field that is ``None`` changes nothing.

    Args:
        scores: bool, ``True`` = kept, broadcastable to ``(B, H, Q, K)``: a dropped score becomes :math:`-\infty` before
            the softmax. A 0-d ``False`` drops the whole layer (uniform attention) without computing :math:`QK^\top`.
        weights: bool or float, broadcastable to ``(B, H, Q, K)``: multiplies the attention weights after the softmax.
            It may have a gradient.
        normalized: like ``weights``, but applied before them, and each row is then divided by its sum, so that it sums
            to 1 again. A row whose valid keys are all dropped becomes uniform over them.
        detach_sum: pass no gradient through that sum.
        kept: bool, broadcastable to ``(B, H, Q, K)``: what drop rates count as kept. By default, a unit is kept if
            ``scores`` keeps it and no factor on it is 0; a relaxed mask, with no factor of exactly 0, sets it.
        drawn: like ``scores``, but decided within the kernel; see :meth:`AttentionSite.dropping`.
        drawn_weights: like ``weights``, but decided within the kernel; see :meth:`AttentionSite.dropping_weights`.
        relaxed: float, in ``[0, 1]``, 0-d or broadcastable to ``(B, H, Q, 1)``: the share of each row's weights that is
            spread evenly over its valid keys, except dropped scores, before ``normalized`` and ``weights``.

    Raises:
        TypeError: if ``scores`` or ``kept`` is not boolean, or ``relaxed`` is not a float per row.

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
        if self.kept is not None and self.kept.dtype != torch.bool:
            raise TypeError(f"Expected `kept` to be a bool tensor (True = kept), got {self.kept.dtype}.")
        if self.scores is not None and self.scores.dtype != torch.bool:
            raise TypeError(
                f"Expected `scores` to be a bool tensor (True = kept), got {self.scores.dtype}: "
                "pass a factor on the attention weights as `weights`."
            )
        relaxed = self.relaxed
        if relaxed is not None and (not relaxed.is_floating_point() or (relaxed.dim() and relaxed.shape[-1] != 1)):
            raise TypeError(
                f"Expected `relaxed` to be a float tensor, 0-d or with a last dimension of size 1, got {relaxed.dtype} "
                f"of shape {tuple(relaxed.shape)}."
            )

    @property
    def has_factors(self) -> bool:
        """Whether the mask changes attention weights, after the softmax."""
        return self.has_products or self.relaxed is not None

    @property
    def has_products(self) -> bool:
        """Whether the mask multiplies attention weights, so that they must be computed."""
        return self.weights is not None or self.normalized is not None or bool(self.drawn_weights)

    @property
    def drops_in_kernel(self) -> bool:
        """Whether a kernel that decides itself what it drops can apply the whole mask."""
        return self.weights is None and self.normalized is None and self.relaxed is None

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
        written = self.written_out()
        factors = (None if factor is None else factor != 0 for factor in (written.weights, written.normalized))
        return functools.reduce(_and, factors, written.scores)

    def written_out(self, dtype: torch.dtype = torch.float32) -> Mask:
        """Return the same mask with all decisions in ``scores`` and ``weights``, the latter of this dtype."""
        if not self.drawn and not self.drawn_weights:
            return self
        scores = functools.reduce(_and, (drawn.written_out() for drawn in self.drawn), self.scores)
        factors = (drawn.factors(dtype) for drawn in self.drawn_weights)
        weights = functools.reduce(lambda a, b: _both(a, b, torch.mul), factors, self.weights)
        return replace(self, scores=scores, weights=weights, drawn=(), drawn_weights=())

    def of_weights(self, weights: Tensor, valid: Tensor | None) -> Tensor:
        """Apply the factors of this mask to attention weights.

        Args:
            weights: ``(B, H, Q, K)``, after the softmax.
            valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model.
        """
        if self.relaxed is not None:
            weights = functional.relaxed_weights(weights, self.relaxed, self.scores, valid)
        if self.normalized is not None:
            weights = functional.renormalized(weights, self.normalized, valid, detach_sum=self.detach_sum)
        if self.weights is None:
            return weights
        return weights * (self.weights.to(weights.dtype) if self.weights.is_floating_point() else self.weights)

    def __and__(self, other: Mask) -> Mask:
        """Apply both masks: what either drops is dropped; factors multiply."""
        return Mask(
            _and(self.scores, other.scores),
            _both(self.weights, other.weights, torch.mul),
            _both(self.normalized, other.normalized, torch.mul),
            all(mask.detach_sum for mask in (self, other) if mask.normalized is not None),
            None if self.kept is other.kept is None else _and(self.units_kept, other.units_kept),
            self.drawn + other.drawn,
            _both(self.relaxed, other.relaxed, lambda a, b: a + b - a * b),
            self.drawn_weights + other.drawn_weights,
        )


def _and(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return _both(a, b, torch.logical_and)


def _both(a: Tensor | None, b: Tensor | None, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)
