"""Origins after operations that only move elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attnreg.injection.discovery import rules
from attnreg.injection.discovery.origins import FIELDS, FIRST, PRODUCT, Origins, blank

aten = torch.ops.aten
IN_FLOAT = (aten.im2col, aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d, aten.replication_pad2d)
OF_ONE: tuple[Any, ...] = (aten.constant_pad_nd, aten.flip, aten.gather, aten.index, aten.index_select)
OF_ONE += (
    aten.masked_select,
    aten.repeat,
    aten.roll,
    aten.take,
    aten.unfold_copy,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    *IN_FLOAT,
)

#: The arguments whose elements each operation moves. Views need no rule, because they share memory.
MOVES: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(OF_ONE, ("self",)),
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


def moved(op: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origins: Origins) -> Tensor:
    """Return the origins after an operation of :data:`MOVES`, by applying it to element numbers."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
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
                dim = given.get("dim", 0) % value.dim()
                places = origins.fresh(value.shape[dim : dim + 1], learned=True)
                origin[FIRST] = places.reshape(2, *(-1 if i == dim else 1 for i in range(value.dim())))
        parts.append(origin.reshape(FIELDS, -1))
        numbers = torch.arange(count, count + value.numel()).reshape(value.shape)
        count += value.numel()
        return numbers.double() if op in IN_FLOAT else numbers

    for name in MOVES[op]:
        if name in given:
            given[name] = tree_map(numbered, given[name])
    if op is aten.constant_pad_nd or "value" in given:
        given["value"] = 0
    for name in ("accumulate", "alpha", "unsafe"):
        given.pop(name, None)
    given = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, given)
    numbers = INSTEAD.get(op, op)(**given).long()
    return torch.cat(parts, 1)[:, numbers.flatten()].reshape(FIELDS, *numbers.shape)


def _adds_positions(origins: Origins, tensors: list[Tensor], dim: int = 0) -> bool:
    """Whether ``cat`` joins positions of a sequence, not features or scores."""
    known = [origins.read(tensor) for tensor in tensors if tensor.numel()]
    scores = any(origin is not None and (rules.has(origin, PRODUCT) or rules.is_pair(origin)) for origin in known)
    return dim % tensors[0].dim() != tensors[0].dim() - 1 and tensors[0].is_floating_point() and not scores
