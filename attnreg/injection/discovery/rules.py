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

#: The arguments whose elements an operation moves. Views need no rule, because they share memory.
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
    return is_known(origin, SECOND) and is_known(origin, FIRST)  # few have a second origin, so it is tested first


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
    """Whether origins ``(2, *shape)``, known or not, differ along a dimension of ``shape``."""
    part = compact(part)
    return bool((part != part.narrow(dim + 1, 0, 1)).any())


def merged(operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Elementwise operations: an element takes the origins of all operands.

    If any operand holds attention scores, the others (a mask, a bias) are ignored. If any has the full shape, operands
    that broadcast (a gate, a summary) are ignored. Two operands that broadcast along different dimensions form pairs
    (additive attention).
    """
    scores = [operand for operand in operands if is_pair(operand)]
    scores = scores or [operand for operand in operands if has(operand, PRODUCT)]
    operands = scores or operands
    broadcast = [_broadcast_dims(operand, shape) for operand in operands]
    full = [operand for operand, dims in zip(operands, broadcast, strict=True) if not dims]
    if full or scores or len(operands) == 1 or broadcast[0] & broadcast[1]:
        return _union(full or operands, shape)
    out = _union(operands, shape).clone()
    # The order of the operands must not matter, because two such biases may be added.
    a, b = operands[:2] if max(broadcast[0]) > max(broadcast[1]) else operands[1::-1]
    out[FIRST] = _expanded(a, shape)[FIRST]
    out[SECOND] = _expanded(b, shape)[FIRST]
    out[PRODUCT] = 1
    return out


def reduced(origin: Tensor, dims: Sequence[int], *, keepdim: bool) -> Tensor:
    """Reductions: an element takes the origins of all elements reduced to it."""
    rank = origin.dim() - 1
    return origin.amax([dim % rank + 1 for dim in dims or range(rank)], keepdim=keepdim)


def resampled(origin: Tensor, shape: Sequence[int]) -> Tensor:
    """Convolution, pooling and interpolation, ``(B, C, *space)`` to ``(B, C', *space')``.

    An element takes the origins of all channels at its place; overlap with neighbours is ignored.
    """
    size = list(shape[2:])
    space = origin.amax(2).double().flatten(0, 1).unsqueeze(1)
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[len(size) - 1]
    pooled = pool(space, size).to(torch.int32).reshape(FIELDS, shape[0], 1, *size)
    return pooled.expand(FIELDS, *shape)


def across(origin: Tensor, shape: Sequence[int]) -> Tensor:
    """Linear maps of the last dimension: an element takes the origins of its whole row."""
    return origin.amax(-1, keepdim=True).expand(FIELDS, *shape)


def before_linear(origin: Tensor) -> Tensor:
    """Prepare origins for a linear map by parameters.

    Scores stay scores, if a query occurs with several keys and a key with several queries. Any other product becomes
    features of the rows of its first factor.
    """
    if is_pair(origin):
        pairs = compact(origin)[FIRST.start : SECOND.stop].flatten(1)
        count, *counts = (len(part.unique(dim=1).T) for part in (pairs, *(pairs[part] for part in PARTS)))
        if count <= max(counts):
            origin = with_field(origin, SECOND, NOTHING)
    return with_field(origin, PRODUCT, NOTHING)


def everywhere(operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Unknown operations: an element takes the origins of all operands."""
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
    """Return the arguments of an operation by name, with the defaults of omitted arguments."""
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def moved(op: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origins: Origins) -> Tensor:
    """Return the origins after an operation of :data:`MOVES`, by applying it to element numbers."""
    arguments = named(func, args, kwargs)
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
                dim = arguments["dim"] % value.dim()
                positions = origins.fresh(value.shape[dim : dim + 1], learned=True)
                origin[FIRST] = positions.reshape(2, *(-1 if i == dim else 1 for i in range(value.dim())))
        parts.append(origin.reshape(FIELDS, -1))
        numbers = torch.arange(count, count + value.numel()).reshape(value.shape)
        count += value.numel()
        return numbers.double() if op in IN_FLOAT else numbers

    for name in MOVES[op]:
        if name in arguments:
            arguments[name] = tree_map(numbered, arguments[name])
    if "value" in arguments:
        arguments["value"] = 0
    for name in ("accumulate", "alpha", "unsafe"):
        arguments.pop(name, None)
    arguments = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, arguments)
    numbers = INSTEAD.get(op, op)(**arguments).long()
    return torch.cat(parts, 1)[:, numbers.flatten()].reshape(FIELDS, *numbers.shape)


def of_queries(weights: Tensor, dim: int, key_part: int | None, size: int | None) -> Tensor | None:
    """Return the query origins ``(2, ...)`` of attention weights that are summed with values over a dimension.

    They are unknown if queries do not depend on the input; ``None`` if the sum is not over keys. If known, ``key_part``
    is the index in ``PARTS`` of the keys' origins, and ``size`` is K.
    """
    moving = [varies(weights[part], dim) for part in PARTS]
    if key_part is None:
        key_part = 0 if moving == [True, False] else 1
    elif not moving[key_part] and (moving[1 - key_part] or (size is not None and weights.shape[1:][dim] > size)):
        return None  # a sum over queries
    return weights[PARTS[1 - key_part]].amax(dim if dim < 0 else dim + 1)


def _union(operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    expanded = [_expanded(operand, shape) for operand in operands]
    # Along dimensions where all operands are expanded, one entry is enough.
    repeated = [all(operand.stride(dim) == 0 for operand in expanded) for dim in range(1, len(shape) + 1)]
    entries = (slice(None), *(slice(0, 1) if is_repeated else slice(None) for is_repeated in repeated))
    return functools.reduce(torch.maximum, [operand[entries] for operand in expanded]).expand(FIELDS, *shape)


def _expanded(operand: Tensor, shape: Sequence[int]) -> Tensor:
    lead = len(shape) - (operand.dim() - 1)
    return operand.reshape(FIELDS, *[1] * lead, *operand.shape[1:]).expand(FIELDS, *shape)


def _broadcast_dims(operand: Tensor, shape: Sequence[int]) -> set[int]:
    """Return the dimensions along which an operand broadcasts to a shape."""
    sizes = [1] * (len(shape) - (operand.dim() - 1)) + list(operand.shape[1:])
    return {dim for dim, (size, full) in enumerate(zip(sizes, shape, strict=True)) if size == 1 < full}


def _adds_positions(origins: Origins, tensors: list[Tensor], dim: int = 0) -> bool:
    """Whether ``cat`` joins positions of a sequence, not features or scores."""
    known = [origins.read(tensor) for tensor in tensors if tensor.numel()]
    scores = any(origin is not None and (has(origin, PRODUCT) or is_pair(origin)) for origin in known)
    return dim % tensors[0].dim() != tensors[0].dim() - 1 and tensors[0].is_floating_point() and not scores
