"""Sites: the places in a model where a regularizer may act, in attention or on hidden states.

Shapes, here and everywhere in the project: B batch, H heads, Q queries, K keys, D head size, L layers; of hidden
states, T is the number of tokens (or patches) and C the number of features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from attnreg import functional, kernels
from attnreg.draws import Drawn, Draws, DrawsHere
from attnreg.errors import InputError
from attnreg.functional.attention import per_head
from attnreg.functional.seeded import transformed
from attnreg.functional.validity import summed
from attnreg.masks import Mask

Stack = Literal["encoder", "decoder", "cross"]
Where = Literal["embeddings", "input", "output", "pooled", "residual"]


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
        shares_keys: whether all queries of a sample share their keys. If not, every query has other keys (a local
            layout: 2 samples with 9 queries of 5 keys per query have scores of shape ``(18, H, 1, 5)``), or every part
            of the attention has (``in_parts``).
        in_parts: whether a forward pass may compute the site in several calls, such as one per image of a batch; the
            regularizer then makes a mask in every call.

    Example:
        >>> SiteInfo(name="bert.encoder.layer.3.attention.self", layer=3, num_layers=12).label
        'encoder.3'
    """

    heads: int | None = None
    head_size: int | None = None
    shares_keys: bool = True
    in_parts: bool = False


S = TypeVar("S", bound=Site)
Result = TypeVar("Result")


def layer_indices(layers: Sequence[int], where: str) -> list[int]:
    """Return layer indices as a list, or raise if they are none; messages name the regularizer ``where``."""
    if not isinstance(layers, Collection) or isinstance(layers, (str, Mapping)) or not len(layers):
        write = f": write [{layers!r}]" if isinstance(layers, int) else ""
        raise InputError(f"Expected `layers` of {where} to be a list with at least one index, got {layers!r}{write}.")
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise InputError(f"Expected `layers` of {where} to be whole numbers, got {layers!r}.")
    return list(layers)


def on_layers(sites: Sequence[S], layers: Collection[int], where: str) -> list[S]:
    """Select the sites on some layers, or raise if a layer has none; messages name the caller ``where``."""
    chosen = [site for site in sites if site.is_among(layers)]
    reached = {index for site in chosen for index in (site.layer, site.layer - site.num_layers)}
    if missing := sorted(set(layers) - reached):
        raise InputError(
            f"Expected layers among {sorted({site.layer for site in sites})} in {where}, got {missing}: the model has "
            "no such layers, or `attach` or an `OnLayers` around this one excludes them."
        )
    return chosen


def check_shared_keys(does: str, sites: Sequence[SiteInfo], *, in_parts: bool = False) -> None:
    """Raise if queries do not share their keys; with ``in_parts``, parts of an attention need not share them."""
    for site in sites:
        if not site.shares_keys and not (in_parts and site.in_parts):
            raise InputError(
                f"{does}, but at {site.name} each {'part' if site.in_parts else 'query'} has its own keys: choose "
                "other attention with `modules=...`."
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSite(SiteInfo, DrawsHere):
    r"""One attention computation, just before it runs.

    Args:
        shape: ``(B, H, Q, K)``, the shape of the attention scores.
        valid: bool, broadcastable to ``shape``: positions that the model allows (padding, causality); ``None``: all.
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
        queries: bool, ``(B, Q)``: the queries of cross-attention that are not padding; ``None`` means all.

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
    queries: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", self.shape[1])
        if self.query is not None:
            object.__setattr__(self, "head_size", self.query.shape[-1])

    @property
    def units(self) -> Tensor | None:
        """Valid positions of real query rows, bool, broadcastable to ``shape``; ``None`` means every position."""
        return self.once("units", self._find_units)

    def _find_units(self) -> Tensor | None:
        rows = None if self.queries is None else self.queries[:, None, :, None]
        if self.valid is None:
            return rows
        units = functional.units(self.valid, self.shape, self_attention=self.stack != "cross")
        return units if rows is None else units & rows

    def rows(self) -> Tensor | None:
        """Return the real query rows, bool, broadcastable to ``(B, H, Q, 1)``; ``None`` means every row."""
        return None if self.units is None else self.units.any(-1, keepdim=True)

    def number_of_units(self) -> Tensor | int:
        """Return the number of units, 0-d."""
        return summed(self.units, self.shape, ())

    def once(self, name: Hashable, find: Callable[[], Result]) -> Result:
        """Return the result of a function of ``valid`` and ``shape`` alone, which layers of a pass may share."""
        return find()

    def valid_of(self, queries: Tensor) -> Tensor | None:
        """Return the valid positions of some query rows ``(R,)``, bool, broadcastable to ``(B, H, R, K)``."""
        return None if self.valid is None else self.valid.expand(self.shape)[:, :, queries]

    def dropping(
        self, p: float | Tensor, shape: tuple[int, int, int, int] | None = None, *, by_query: bool | None = None
    ) -> Mask:
        """Return a mask that drops scores independently with probability p; where possible, within the kernel.

        Arguments are as in :meth:`keep`; ``shape`` is ``(B, H, Q, K)``, with 1 where positions share a decision.
        """
        shape, by_query = (self.shape, True) if shape is None else (shape, by_query)
        if self.in_kernel:
            seed = self.draws.next_seed()
            return Mask(drawn=(Drawn(seed, p, shape, self.device, **self.draws.place(shape, by_query, self.device)),))
        return Mask(scores=self.keep(p, shape, by_query=by_query))

    def dropping_weights(self, p: float, *, rescale: bool = True) -> Mask:
        """Return a mask that drops attention weights with probability p; where possible, within the kernel.

        With ``rescale``, kept weights are divided by 1 - p.
        """
        seed = self.draws.next_seed()
        drawn = Drawn(seed, p, self.shape, self.device, rescale, **self.draws.place(self.shape, True, self.device))
        return Mask(drawn_weights=(drawn,)) if self.in_kernel else Mask(weights=drawn.factors(self.dtype))

    def head_factors(self, p: float | Tensor) -> Tensor:
        """Return factors that drop whole heads of a sample, as :class:`attnreg.DropHead` does; on a GPU in one launch.

        Returns:
            ``(B, H)``; the factors of a sample sum to H.
        """
        batch, heads = self.shape[:2]
        place, seed = self.draws.place((batch, heads), False, self.device), self.draws.next_seed()
        if kernels.runs_on(self.device) and not transformed():
            samples = place.get("samples")
            return kernels.head_factors(seed, batch, heads, p, device=self.device, dtype=self.dtype, samples=samples)
        keep = functional.sample_heads(p, functional.seeded_uniform(seed, (batch, heads), device=self.device, **place))
        factors = keep * (keep.sum(1, keepdim=True).reciprocal() * heads)
        return factors if factors.dtype == self.dtype else factors.to(self.dtype)

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
            key = per_head(self.key, self.query.shape[1])
            scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
            scores = self.query @ key.transpose(-1, -2) * scale
            scores = scores if self.bias is None else scores + self.bias
            scores = functional.apply_score_mod(self.score_mod, scores)
        return scores if self.valid is None else scores.masked_fill(~self.valid, -torch.inf)


@dataclass(frozen=True, kw_only=True)
class HiddenInfo(Site):
    """Position of a hidden-state site in its model.

    Args:
        where: ``"embeddings"`` (the states that enter the first block of a list of blocks), ``"input"`` or ``"output"``
            of a Transformer block, ``"residual"`` (the updates that the residual connections of a block add), or
            ``"pooled"`` (the one vector per sample that the last linear layer takes).
        name: qualified name of the block or linear layer, as in :class:`Site`, as are ``layer``, ``num_layers`` and
            ``stack``. Embeddings have the layer of the block that they enter, the pooled state the layer of the last.

    Example:
        >>> HiddenInfo(where="output", layer=3, num_layers=12).label
        'encoder.3.output'
    """

    name: str = "block"
    where: Where = "output"

    @property
    def label(self) -> str:
        """Short unique name, ``"<stack>.<layer>.<where>"``, or ``"pooled"``."""
        # Without `super()`, because torch.compile would not recognize the label as the key of a dict.
        return self.where if self.where == "pooled" else f"{self.stack}.{self.layer}.{self.where}"


@dataclass(frozen=True, kw_only=True, eq=False)
class HiddenSite(HiddenInfo, DrawsHere):
    """Hidden states in one forward pass.

    Args:
        shape: ``(B, T, C)``; ``(B, C)`` for the pooled state.
        valid: bool, ``(B, T)``, ``True`` = a token that is not padding; ``None`` means all.
        padding_unknown: whether the model got a mask, but for other tokens than these hidden states, so that
            ``valid`` is ``None`` although there may be padding.
        draws: the source of randomness; see :meth:`keep`, :meth:`uniform`, :meth:`normal` and :meth:`dropout`.
        device: device of the states.
        dtype: dtype of the states.
        counter: allocates int64, ``(2,)``, where :meth:`dropout` counts in a kernel; ``None`` counts nothing.

    Example:
        >>> site = HiddenSite(shape=(2, 3, 8), valid=torch.tensor([[True, True, False], [True, True, True]]))
        >>> site.lengths.tolist()
        [2, 3]
    """

    shape: tuple[int, ...]
    valid: Tensor | None = field(default=None, repr=False)
    padding_unknown: bool = False
    draws: Draws = field(default_factory=Draws, repr=False)
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    dtype: torch.dtype = torch.float32
    counter: Callable[[], Tensor] | None = field(default=None, repr=False)
    _counts: list[Tensor] = field(default_factory=list, init=False, repr=False)  # of kernels, for the drop rate
    _zeroed: list[Tensor] = field(default_factory=list, init=False, repr=False)  # by regularizer, for the drop rate

    @property
    def tokens(self) -> Tensor:
        """The tokens that are not padding, bool, ``(B, T)``.

        Raises:
            InputError: if the site has no tokens, or padding is unknown.
        """
        if len(self.shape) != 3:
            raise InputError(f"The pooled state at {self.name} has no tokens.")
        if self.padding_unknown:
            raise InputError(
                f"The padding of the hidden states of {self.name} is unknown: they have {self.shape[1]} tokens, which "
                "are not those of the attention mask, or the mask was not given when the model was attached. Attach "
                "with `example_inputs` that hold it, use a regularizer that needs no lengths, or no padding."
            )
        everything = torch.ones(self.shape[:2], dtype=torch.bool, device=self.device)
        return everything if self.valid is None else self.valid

    @property
    def lengths(self) -> Tensor:
        """The numbers of tokens of samples without padding, ``(B,)``, at least 1; raises as :attr:`tokens`."""
        return self.tokens.sum(1).clamp(min=1)

    def dropout(self, states: Tensor, p: float | Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Set values of the states to zero with probability p, and divide the others by 1 - p; on a GPU in a kernel.

        Args:
            states: the states, of the shape of the site.
            p: drop probability; a tensor must be 0-d.
            shape: the shape of the decisions (default: the site's), with 1 for tokens that share them.
        """
        by_query = shape is None or len(shape) < 3 or shape[1] > 1
        shape = self.shape if shape is None else shape
        place = self.draws.place(shape, by_query, self.device)
        is_plain = isinstance(place["first_query"], int) and place.get("samples") is None and "first_key" not in place
        if is_plain and kernels.drops(states):
            counts = None if self.counter is None else self.counter()
            states_4d, dims = states.view(*[1] * (4 - states.dim()), *states.shape), (*[1] * (4 - len(shape)), *shape)
            seed = self.draws.next_seed()
            out = kernels.dropout(
                states_4d, seed, p, shape=dims, first_query=place["first_query"], valid=self.valid, counts=counts
            )
            if counts is not None:
                self._counts.append(counts)
            return out.view(states.shape)
        keep = self.keep(p, shape, by_query=by_query).to(self.dtype)
        return states * (keep / (1 - p + (p == 1)))
