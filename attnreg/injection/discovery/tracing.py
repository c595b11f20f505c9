"""Track the origins of tensor elements through every operation of a forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnreg.injection.discovery import rules
from attnreg.injection.discovery.origins import FIELDS, FIRST, NOTHING, SOFTMAX, VALUED, Origins, blank, compact, key_of

aten = torch.ops.aten
LARGE = 2**14  # products with larger weights are replaced by something cheap: only origins matter, not values
PRODUCTS = {aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2)}
LINEAR = (aten.mm, aten.addmm)
EMBEDDINGS = (aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only)
RESAMPLING = ("conv", "pool", "upsample")
FROM_NOWHERE = ("new_", "zeros", "ones", "full", "empty", "rand", "arange")


class Tracer(TorchDispatchMode):
    """Tracks origins through the ATen operations that torch's Python functions consist of.

    Products with large parameters are replaced by something cheaper of the same shape. In-place changes of the model's
    tensors (``held``) and of its inputs are undone at the end of the block. When weights are multiplied by values, the
    tracer calls ``weighted`` with the number of the softmax that computed the weights, ``None`` without a softmax.
    """

    def __init__(
        self, held: Iterable[Tensor], inputs: Sequence[Tensor], weighted: Callable[[int | None], None]
    ) -> None:
        super().__init__()
        self.origins = Origins()
        for tensor in inputs:
            self.origins.seed(tensor)
        self._held = {*map(key_of, held)} - {0}
        self._restored = {*map(key_of, inputs), *self._held} - {0}
        self._weighted = weighted
        self._keys: dict[int, tuple[int | None, int]] = {}  # by softmax: the part of the keys' origins, and K
        self._combined: dict[int, int] = {}  # softmaxes whose weights were combined: later to earlier
        self._overwritten: dict[int, tuple[Tensor, Tensor]] = {}
        self._paused = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, original in self._overwritten.values():
            tensor.copy_(original)
        self._overwritten = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Track nothing within the block."""
        if self._paused:
            yield
            return
        self._paused = True
        super().__exit__(None, None, None)
        try:
            yield
        finally:
            super().__enter__()
            self._paused = False

    def came_from_softmax(self, weights: Tensor, number: int, key_part: int | None, size: int) -> None:
        """Mark the output of a softmax; ``key_part`` is the index in ``PARTS`` of the keys' origins, ``size`` is K."""
        with self.paused():
            self._keys[number] = key_part, size
            origin = self.origins.read(weights)
            origin = blank(weights.shape) if origin is None else origin
            self.origins.write(weights, rules.with_field(origin, SOFTMAX, number))

    def came_from_queries(self, out: Tensor, scores: Tensor) -> None:
        """Mark the output ``(..., Q, D)`` of a fused kernel by the origins of scores ``(FIELDS, ..., Q, K)``."""
        with self.paused():
            queries = scores[FIRST].amax(-1, keepdim=True).expand(2, *out.shape)
            self.origins.write(out, self._at_queries(queries, out))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._save_overwritten(func, args, kwargs)
        op = getattr(func, "overloadpacket", func)
        out = self._instead_of_linear(*args[-2:]) if op in LINEAR and len(args) >= 2 else None
        if out is None:
            out = func(*args, **kwargs)
        if not (getattr(func, "is_view", False) or op is aten._unsafe_view):
            try:
                self._follow(op, func, args, kwargs, out)
            except Exception:  # an operation that no rule covers must not stop the model
                self._lose_track(args, kwargs, out)
        return out

    def _is_held(self, tensor: Tensor) -> bool:
        return key_of(tensor) in self._held

    def _save_overwritten(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, Tensor) and key_of(value) in self._restored:
                whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
                self._overwritten.setdefault(key_of(value), (whole, whole.clone()))

    def _instead_of_linear(self, x: Tensor, weight: Tensor) -> Tensor | None:
        if weight.dim() != 2 or weight.numel() < LARGE or not self._is_held(weight) or self._is_held(x):
            return None
        return x.index_select(1, torch.arange(weight.shape[1], device=x.device) % x.shape[1])

    def _follow(self, op: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        outs = _tensors(out)
        if not outs:
            return
        tensors = _tensors(*args, *kwargs.values())
        origins = [self.origins.read(tensor) for tensor in tensors]
        first, name = outs[0], func._schema.name.removeprefix("aten::")
        if op in PRODUCTS:
            left, right = PRODUCTS[op]
            self.origins.write(first, self._product(args[left], args[right], first))
        elif all(origin is None for origin in origins) or name.startswith(FROM_NOWHERE) or op is aten.fill_:
            self.origins.write(first, None)
        elif op in EMBEDDINGS:
            self.origins.write(first, None)
            if self.origins.read(args[1]) is not None:  # rows whose ids come from an input are new positions
                self.origins.seed(first, first.dim() - 1)
        elif op in rules.MOVES:
            self.origins.write(first, rules.moved(op, func, args, kwargs, self.origins))
        elif op is aten.copy_:
            self.origins.write(first, origins[1])
        elif "attention" in name:  # a fused kernel that no torch function has announced
            self._weighted(None)
            self.origins.write(first, origins[0])
        else:
            for tensor in outs[: 1 if "norm" in name else None]:
                self.origins.write(tensor, self._computed(op, func, args, kwargs, tensors, origins, tensor))

    def _lose_track(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Let every output element come from all inputs of the operation."""
        origins = [self.origins.read(tensor) for tensor in _tensors(*args, *kwargs.values())]
        known = [origin for origin in origins if origin is not None]
        for tensor in _tensors(out):
            self.origins.write(tensor, rules.everywhere(known, tensor.shape) if known else None)

    def _computed(
        self,
        op: Any,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        origins: list[Tensor | None],
        out: Tensor,
    ) -> Tensor:
        known = [origin for origin in origins if origin is not None]
        floats = [o for t, o in zip(tensors, origins, strict=True) if o is not None and t.dtype != torch.bool]
        first = known[0]
        name = func._schema.name
        if _broadcast_shape(tensors) == out.shape:
            result = rules.merged(floats or known, out.shape)
            self._combine({int(origin[SOFTMAX].max()) for origin in known if rules.has(origin, SOFTMAX)})
            if op in (aten.mul, aten.mul_) and _multiplies_values(tensors, origins):
                return rules.with_field(result, VALUED, 1)
            return result
        if "grid_sampler" in name:  # a sample belongs to its grid point, as attention output belongs to its query
            grid = origins[1] if origins[1] is not None else rules.everywhere(known, args[1].shape)
            return rules.across(grid, args[1].shape).movedim(-1, 2)[:, :, :1].expand(FIELDS, *out.shape)
        arguments = rules.named(func, args, kwargs)
        if "dim" in arguments or "dims" in arguments:
            dims = arguments.get("dim", arguments.get("dims"))
            dims = [] if dims is None else list(dims) if isinstance(dims, (list, tuple)) else [dims]
            self._combine(_numbers(first))  # a mean of joined weights
            if first.dim() - 1 == out.dim():
                return rules.reduced(first, dims, keepdim=True).expand(FIELDS, *out.shape)
            queries = self._summed_over_keys(first, dims)
            if queries is not None:
                return self._at_queries(queries.reshape(2, *out.shape), out)
            return rules.reduced(first, dims, keepdim=False).reshape(FIELDS, *out.shape)
        if first.dim() - 1 == out.dim() >= 3 and any(kind in name for kind in RESAMPLING):
            return rules.resampled(first, out.shape)
        if first.dim() - 1 == out.dim() > 0 and first.shape[1:-1] == out.shape[:-1]:
            return rules.across(rules.before_linear(first) if any(map(self._is_held, tensors)) else first, out.shape)
        return rules.everywhere(known, out.shape)

    def _summed_over_keys(self, origin: Tensor, dims: list[int]) -> Tensor | None:
        """Return the queries if ``dims`` sums elementwise products of weights and values over keys."""
        if not rules.has(origin, VALUED) or len(dims) != 1:
            return None
        number = int(origin[SOFTMAX].max())
        queries = rules.of_queries(origin, dims[0], *self._keys[number]) if number in self._keys else None
        if queries is not None:
            self._confirm(number)
        return queries

    def _product(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor | None:
        left = None if self._is_held(a) else self.origins.read(a)
        right = None if self._is_held(b) else self.origins.read(b)
        if left is None and right is None and (self._is_held(a) or self._is_held(b)):
            return None
        if self._is_held(b) and left is not None:
            return rules.across(rules.before_linear(left), out.shape)
        if self._is_held(a) and right is not None:
            return rules.before_linear(right).amax(-2, keepdim=True).expand(FIELDS, *out.shape)
        sides = [(weights, dim) for weights, dim in ((left, -1), (right, -2)) if weights is not None]
        sides.sort(key=lambda side: not rules.has(side[0], SOFTMAX))
        for weights, dim in sides:
            number = int(weights[SOFTMAX].max())
            if number == NOTHING and not rules.pairs_along(weights, dim):
                continue
            queries = rules.of_queries(weights, dim, *self._keys.get(number, (None, None)))
            if queries is not None:
                numbers: Sequence[int | None] = _numbers(weights) or [None]
                for each in numbers:  # several where weights were joined, as by `torch.cat`
                    self._confirm(each)
                return self._at_queries(queries.unsqueeze(dim).expand(2, *out.shape), out)
        return rules.scores(left, right, out.shape)

    def _confirm(self, number: int | None) -> None:
        """Report that weights, and all weights that were combined with them, are multiplied by values."""
        self._weighted(number)
        while number in self._combined:
            number = self._combined.pop(number)
            self._weighted(number)

    def _combine(self, numbers: Iterable[int]) -> None:
        """Note that a tensor is computed from the weights of several softmaxes."""
        self._combined.update((later, earlier) for earlier, later in itertools.pairwise(sorted(numbers)))

    def _at_queries(self, queries: Tensor, out: Tensor) -> Tensor:
        """Give attention output the origins of its queries, or new positions if the queries have none."""
        queries = compact(queries)
        if not (queries[1] != NOTHING).any():
            queries = self.origins.fresh(out.shape[:-1], learned=True).unsqueeze(-1)
        origin = blank(queries.shape[1:])
        origin[FIRST] = queries
        return origin.expand(FIELDS, *out.shape)


def _numbers(origin: Tensor) -> list[int]:
    """Return the numbers of the softmaxes from which a tensor's elements come."""
    return [int(number) for number in compact(origin)[SOFTMAX].unique() if number != NOTHING]


def _tensors(*values: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments, including those in containers."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple, dict)):
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors


def _broadcast_shape(tensors: list[Tensor]) -> torch.Size | None:
    shapes = {tensor.shape for tensor in tensors}
    try:
        return shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


def _multiplies_values(tensors: list[Tensor], origins: list[Tensor | None]) -> bool:
    """Whether one of two factors holds softmax weights, and the other values (not a mask on the weights)."""
    if len(tensors) != 2:
        return False
    are_weights = [origin is not None and rules.has(origin, SOFTMAX) for origin in origins]
    if are_weights[0] == are_weights[1]:
        return False
    values, weights = tensors[are_weights.index(False)], tensors[are_weights.index(True)]
    return any(n > 1 == m for n, m in zip(reversed(values.shape), reversed(weights.shape), strict=False)) or (
        values.dim() > weights.dim()
    )
