"""How operations change the origins of elements: pure functions on tensors ``(FIELDS, *shape)``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from attnreg.injection.discovery.origins import FIELDS, FIRST, NOTHING, PRODUCT, SECOND, Origins, blank, compact

PARTS = (FIRST, SECOND)

aten = torch.ops.aten
IN_FLOAT = (aten.im2col, aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d, aten.replication_pad2d)
OF_ONE: tuple[Any, ...] = (aten.constant_pad_nd, aten.flip, aten.gather, aten.index, aten.index_select, aten.repeat)
OF_ONE += (aten.masked_select, aten.roll, aten.take, aten.unfold_copy, aten.pixel_shuffle, aten.pixel_unshuffle)

#: The arguments whose elements each operation moves. Views need no rule, because they share memory.
MOVES: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((*OF_ONE, *IN_FLOAT), ("self",)),
    **dict.fromkeys((aten.cat, aten.stack), ("tensors",)),
    **dict.fromkeys((aten.index_put, aten.index_put_, aten._index_put_impl_), ("self", "values")),
    **dict.fromkeys((aten.index_copy, aten.index_copy_, aten.index_add, aten.index_add_), ("self", "source")),
    **dict.fromkeys((aten.masked_scatter, aten.masked_scatter_), ("self", "source")),
    **dict.fromkeys((aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_), ("self", "src")),
    **dict.fromkeys((aten.slice_scatter, aten.select_scatter), ("self", "src")),
}
#: The operation to apply to element numbers instead: never in place, and adding becomes replacing.
INSTEAD = {
    **dict.fromkeys((aten.index_add, aten.index_add_, aten.index_copy_), aten.index_copy),
    **dict.fromkeys((aten.index_put_, aten._index_put_impl_), aten.index_put),
    **dict.fromkeys((aten.scatter_, aten.scatter_add, aten.scatter_add_), aten.scatter),
    aten.masked_scatter_: aten.masked_scatter,
}


def is_known(origin: Tensor, part: slice) -> bool:
    """Whether any element has a known origin in this part."""
    return has(origin, part.stop - 1)


def is_pair(origin: Tensor) -> bool:
    """Whether elements have two origins, as attention scores have a query and a key."""
    return is_known(origin, SECOND) and is_known(origin, FIRST)  # few have a second, so it is tested first


def has(origin: Tensor, field: int) -> bool:
    """Whether any element has a value in a field."""
    return bool((compact(origin)[field] != NOTHING).any())


def with_field(origin: Tensor, field: int | slice, value: int) -> Tensor:
    """Set a field, or several, of all elements to a value."""
    shape, origin = origin.shape, compact(origin).clone()
    origin[field] = value
    return origin.expand(shape)


def varies(part: Tensor, dim: int) -> bool:
    """Whether known origins ``(2, *shape)`` differ along a dimension of ``shape``."""
    dim = dim + 1 if dim >= 0 else dim
    part = compact(part)
    if part.shape[dim] == 1:
        return False
    highest = part.amax(dim)
    lowest = part.masked_fill(part == NOTHING, -NOTHING - 1).amin(dim)
    return bool(((highest != lowest) & (highest != NOTHING)).any())


def differs(part: Tensor, dim: int) -> bool:
    """Whether origins ``(2, *shape)`` differ along a dimension of ``shape``, unknown ones included."""
    part = compact(part)
    return bool((part != part.narrow(dim + 1, 0, 1)).any())


def merged(operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Elementwise operations: an element takes the origins of all operands.

    If any operand holds attention scores, others (a mask, a bias) are ignored. If any has the full shape, those that
    broadcast (a gate, a summary) are. Two that broadcast along different dimensions form pairs (additive attention).
    """
    scores = [operand for operand in operands if is_pair(operand)]
    scores = scores or [operand for operand in operands if has(operand, PRODUCT)]
    operands = scores or operands
    lacking = [_lacking(operand, shape) for operand in operands]
    full = [operand for operand, lacks in zip(operands, lacking, strict=True) if not lacks]
    if full or scores or len(operands) == 1:
        return _union(full or operands, shape)
    if lacking[0] & lacking[1] or not (lacking[0] - lacking[1] and lacking[1] - lacking[0]):
        return _union(operands, shape)
    out = _union(operands, shape).clone()
    # In one order, however they are written: two such biases may be added.
    a, b = operands[:2] if max(lacking[0]) > max(lacking[1]) else operands[1::-1]
    out[FIRST] = _fitted(a, shape)[FIRST]
    out[SECOND] = _fitted(b, shape)[FIRST]
    out[PRODUCT] = 1
    return out


def reduced(origin: Tensor, dims: Sequence[int], *, keepdim: bool) -> Tensor:
    """Reductions: an element takes the origins of all elements reduced to it."""
    rank = origin.dim() - 1
    return origin.amax([dim % rank + 1 for dim in dims or range(rank)], keepdim=keepdim)


def resampled(origin: Tensor, shape: Sequence[int]) -> Tensor:
    """Convolution, pooling and interpolation, ``(B, C, *space)`` to ``(B, C', *space')``.

    An element takes the origins of all channels at its own places; overlap with neighbours is ignored.
    """
    over_channels = origin.amax(2)
    size = list(shape[2:])
    space = over_channels.double().flatten(0, 1).unsqueeze(1)
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[len(size) - 1]
    pooled = pool(space, size).to(torch.int32).reshape(FIELDS, shape[0], 1, *size)
    return pooled.expand(FIELDS, *shape)


def across(origin: Tensor, shape: Sequence[int]) -> Tensor:
    """Linear maps of the last dimension: an element takes the origins of its whole row."""
    return origin.amax(-1, keepdim=True).expand(FIELDS, *shape)


def settled(origin: Tensor) -> Tensor:
    """Prepare origins for a linear map by parameters.

    Scores stay scores, if a query occurs with several keys and a key with several queries. Any other product becomes
    features of the rows of its first factor.
    """
    if is_pair(origin):
        pairs = compact(origin)[FIRST.start : SECOND.stop].flatten(1)
        count, *each = (len(part.unique(dim=1).T) for part in (pairs, *(pairs[part] for part in PARTS)))
        if count <= max(each):
            origin = with_field(origin, SECOND, NOTHING)
    return with_field(origin, PRODUCT, NOTHING)


def everywhere(operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Unknown operations: each element takes the origins of all operands."""
    fields = torch.stack([operand.flatten(1).amax(1) for operand in operands]).amax(0)
    return fields.reshape(FIELDS, *[1] * len(shape)).expand(FIELDS, *shape)


def scores(queries: Tensor | None, keys: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Products of rows ``(..., m, d)`` and columns ``(..., d, n)``: an element has the origins of both."""
    out = blank(shape, product=True)
    if queries is not None:
        out[FIRST] = queries[FIRST].amax(-1, keepdim=True)
    if keys is not None:
        out[SECOND] = keys[FIRST].amax(-2, keepdim=True)
    return out


def pairs_along(origin: Tensor, dim: int) -> bool:
    """Whether elements have two origins, one of which differs along a dimension."""
    return is_pair(origin) and any(varies(origin[part], dim) for part in PARTS)


def named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, with the defaults of those that are not given."""
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def moved(op: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origins: Origins) -> Tensor:
    """Return the origins after an operation of :data:`MOVES`, by applying it to element numbers."""
    given = named(func, args, kwargs)
    learned = op is aten.cat and _adds_positions(origins, *args, **kwargs)
    parts = [blank((1,))]  # number 0: an element without origin
    count = 1

    def numbered(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, Tensor):
            return 0 if isinstance(value, float) else value
        origin = origins.read(value)
        if origin is None:
            origin = blank(value.shape)
            if learned and bool(value.any()):  # all zeros are padding
                dim = given["dim"] % value.dim()
                places = origins.fresh(value.shape[dim : dim + 1], learned=True)
                origin[FIRST] = places.reshape(2, *(-1 if i == dim else 1 for i in range(value.dim())))
        parts.append(origin.reshape(FIELDS, -1))
        numbers = torch.arange(count, count + value.numel()).reshape(value.shape)
        count += value.numel()
        return numbers.double() if op in IN_FLOAT else numbers

    for name in MOVES[op]:
        if name in given:
            given[name] = tree_map(numbered, given[name])
    if "value" in given:
        given["value"] = 0
    for name in ("accumulate", "alpha", "unsafe"):
        given.pop(name, None)
    given = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, given)
    numbers = INSTEAD.get(op, op)(**given).long()
    return torch.cat(parts, 1)[:, numbers.flatten()].reshape(FIELDS, *numbers.shape)


def of_queries(weights: Tensor, dim: int, keys: int | None, size: int | None) -> Tensor | None:
    """Return the query origins ``(2, ...)`` of attention weights that are summed with values over a dimension.

    They are unknown if queries do not depend on the input; ``None`` if the sum is not over keys. If known, ``keys`` is
    which of the two origins of weights is the keys' (0 or 1), and ``size`` is K.
    """
    moving = [varies(weights[part], dim) for part in PARTS]
    if keys is None:
        keys = 0 if moving == [True, False] else 1
    elif not moving[keys] and (moving[1 - keys] or (size is not None and weights.shape[1:][dim] > size)):
        return None  # a sum over queries
    return weights[PARTS[1 - keys]].amax(dim if dim < 0 else dim + 1)


def _union(operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    fitted = [_fitted(operand, shape) for operand in operands]
    # Along dimensions where all operands are expanded, one entry is enough.
    same = [all(each.stride(dim) == 0 for each in fitted) for dim in range(1, len(shape) + 1)]
    once = (slice(None), *(slice(0, 1) if each else slice(None) for each in same))
    small = [each[once] for each in fitted]
    return functools.reduce(torch.maximum, small).expand(FIELDS, *shape)


def _fitted(operand: Tensor, shape: Sequence[int]) -> Tensor:
    lead = len(shape) - (operand.dim() - 1)
    return operand.reshape(FIELDS, *[1] * lead, *operand.shape[1:]).expand(FIELDS, *shape)


def _lacking(operand: Tensor, shape: Sequence[int]) -> set[int]:
    lead = len(shape) - (operand.dim() - 1)
    own = [1] * lead + list(operand.shape[1:])
    return {dim for dim, (mine, full) in enumerate(zip(own, shape, strict=True)) if mine == 1 < full}


def _adds_positions(origins: Origins, tensors: list[Tensor], dim: int = 0) -> bool:
    """Whether ``cat`` joins positions of a sequence, not features or scores."""
    known = [origins.read(tensor) for tensor in tensors if tensor.numel()]
    scores = any(origin is not None and (has(origin, PRODUCT) or is_pair(origin)) for origin in known)
    return dim % tensors[0].dim() != tensors[0].dim() - 1 and tensors[0].is_floating_point() and not scores
