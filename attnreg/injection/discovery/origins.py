"""Record from which input positions the tensor elements of a forward pass come."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The fields of an element. An element has up to two origins: an attention score comes from a query and a key. An origin
# is an interval of positions, stored as its negated lowest and its highest, so that the maximum of two is their union.
FIRST, SECOND = slice(0, 2), slice(2, 4)
SOFTMAX = 4  # the number of the softmax that computed it
PRODUCT = 5  # 1 if it is an element of a product of two tensors, neither of which is a parameter
VALUED = 6  # 1 if it is a softmax weight multiplied by something
FIELDS = 7
NOTHING = torch.iinfo(torch.int32).min


@dataclass
class _Memory:
    """The origins in one storage: an entry per block of elements that share their origins."""

    storage: weakref.ref[torch.UntypedStorage]
    shadow: Tensor  # (FIELDS, blocks)
    unit: int  # bytes of an element
    block: int  # elements in a block


class Origins:
    """Memory that holds the origins of the elements of all tensors, by storage.

    A *position* is one element of an input, or one row of an embedding's output. A *stream* is a range of positions
    created at once. Elements that depend on no input (parameters, constants) have no origin. Views share memory and so
    share origins; for other tensors, :class:`~attnreg.injection.discovery.tracing.Tracer` writes them.
    """

    def __init__(self) -> None:
        self._memory: dict[int, _Memory] = {}
        self._streams = [0]  # the first position of every stream, and of the next stream
        self._widths = [1]  # features per position, by stream
        self.learned: set[int] = set()  # streams of parameters, and of attention output whose queries are parameters

    def read(self, tensor: Tensor) -> Tensor | None:
        """Return the origins ``(FIELDS, *tensor.shape)``, int32, on the CPU, read-only; ``None`` if none are known."""
        memory = self._memory.get(key_of(tensor))
        return None if memory is None else _view(memory, tensor)

    def write(self, tensor: Tensor, origin: Tensor | None) -> None:
        """Set the origins of a tensor's elements, broadcastable to ``(FIELDS, *tensor.shape)``; ``None`` for none."""
        if tensor.layout != torch.strided or not tensor.numel():
            return
        memory = self._memory.get(key_of(tensor))
        if memory is None and origin is None:
            return
        origin = blank(()).reshape(FIELDS, *[1] * tensor.dim()) if origin is None else origin
        origin = origin.expand(FIELDS, *tensor.shape)
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size()
        if whole:  # trailing dimensions with the same origin form blocks
            dims = tensor.dim()
            while dims and origin.stride(dims) == 0:
                dims -= 1
            block = tensor.shape[dims:].numel()
            first = (slice(None),) * (dims + 1) + (0,) * (tensor.dim() - dims)
            shadow = origin[first].reshape(FIELDS, -1).clone()
        else:
            block = 1
            shadow = torch.full((FIELDS, storage.nbytes() // tensor.element_size()), NOTHING, dtype=torch.int32)
        if whole or memory is None:
            key, memories = storage._cdata, self._memory
            # Another storage may get the key of one that is freed.
            freed = weakref.ref(storage, lambda _: memories.pop(key, None))
            reference = freed if memory is None else memory.storage
            memory = self._memory[key] = _Memory(reference, shadow, tensor.element_size(), block)
        if not whole:
            if memory.block > 1:
                memory.shadow, memory.block = memory.shadow.repeat_interleave(memory.block, 1), 1
            _view(memory, tensor).copy_(origin)

    def seed(self, tensor: Tensor, dims: int | None = None) -> None:
        """Make a tensor's elements new positions, one per index into its first ``dims`` dimensions."""
        if tensor.layout != torch.strided or not tensor.numel():
            return
        shape = tensor.shape if dims is None else tensor.shape[:dims]
        positions = self.fresh(shape, width=tensor.shape[-1] if dims is None and tensor.dim() == 3 else 1)
        origin = torch.full((FIELDS, *shape, *[1] * (tensor.dim() - len(shape))), NOTHING, dtype=torch.int32)
        origin[FIRST] = positions.reshape(2, *origin.shape[1:])
        self.write(tensor, origin)

    def fresh(self, shape: Sequence[int], *, width: int = 1, learned: bool = False) -> Tensor:
        """Create a stream of new positions; return their origins ``(2, *shape)``.

        If ``width`` is above 1, so many consecutive positions are the features of one. ``learned`` positions are
        parameters inserted into a sequence, or attention output whose queries are parameters.
        """
        if learned:
            self.learned.add(len(self._streams) - 1)
        begin = self._streams[-1]
        positions = torch.arange(begin, begin + torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
        self._widths[-1] = width
        self._widths.append(1)
        self._streams.append(begin + max(positions.numel(), 1))
        return torch.stack([-positions, positions])

    def streams(self, origin: Tensor) -> set[int]:
        """Return the streams at the ends of the intervals of origins ``(2, ...)``."""
        return set(self.ends(compact(origin)).unique().tolist()) - {-1}

    def ends(self, origin: Tensor) -> Tensor:
        """Return the streams at the lower and upper ends of the intervals, ``(2, ...)``; -1 without origin."""
        signs = torch.tensor([-1, 1], dtype=torch.int32).reshape(2, *[1] * (origin.dim() - 1))
        return self._streams_of(signs * origin).masked_fill(origin == NOTHING, -1)

    def positions(self, origin: Tensor) -> Tensor:
        """Return the origins with the features of a position merged into one."""
        starts = torch.tensor(self._streams, dtype=torch.int32)
        widths = torch.tensor(self._widths, dtype=torch.int32)
        shape, origin = origin.shape, compact(origin).clone()
        for part in (FIRST, SECOND):
            for field, sign in zip(range(part.start, part.stop), (-1, 1), strict=True):
                ends = sign * origin[field]
                stream = self._streams_of(ends).clamp(min=0)
                ends = starts[stream] + (ends - starts[stream]) // widths[stream]
                origin[field] = torch.where(origin[field] == NOTHING, origin[field], sign * ends)
        return origin.expand(shape)

    def _streams_of(self, ends: Tensor) -> Tensor:
        return torch.bucketize(ends, torch.tensor(self._streams, dtype=torch.int32), right=True) - 1


def blank(shape: Sequence[int], *, product: bool = False) -> Tensor:
    """Return the fields of elements without origin."""
    origin = torch.full((FIELDS, *shape), NOTHING, dtype=torch.int32)
    if product:
        origin[PRODUCT] = 1
    return origin


def compact(origin: Tensor) -> Tensor:
    """Reduce expanded dimensions to one entry."""
    return origin[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in origin.stride())]


def _view(memory: _Memory, tensor: Tensor) -> Tensor:
    """Return the entries of a tensor's elements, as a view."""
    scale = tensor.element_size() // memory.unit
    strides = [scale * stride for stride in tensor.stride()]
    offset = scale * tensor.storage_offset()
    inner = [stride % memory.block != 0 for stride in strides]
    extent = sum((size - 1) * stride for size, stride, i in zip(tensor.shape, strides, inner, strict=True) if i)
    if memory.block > 1 and offset % memory.block + extent >= memory.block:
        memory.shadow, memory.block = memory.shadow.repeat_interleave(memory.block, 1), 1
        return _view(memory, tensor)
    strides = [0 if i else stride // memory.block for stride, i in zip(strides, inner, strict=True)]
    blocks = memory.shadow.shape[1]
    return memory.shadow.as_strided((FIELDS, *tensor.shape), (blocks, *strides), offset // memory.block)


def key_of(tensor: Tensor) -> int:
    """Return the key of a tensor's storage, unique while the storage lives; 0 of a tensor without storage."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
