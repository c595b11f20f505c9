"""The randomness of one forward pass: numbers that follow from its seed."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnreg import functional
from attnreg.errors import InputError
from attnreg.functional.seeded import is_traced, keep_of_rows, key_steps, row_words

MOST_HEADS = 2**12
KeepAt = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Draws:
    """A source of random numbers, which gives the same numbers for the same seed, on any device.

    Every draw has other numbers, so that two draws are independent; draw in the same order to repeat them.

    Args:
        seed: the seed: an integer, or int64, 0-d, or a function that returns it at the first draw; ``None`` takes a new
            seed from torch's generator for every draw.
        replayed: whether the numbers repeat the draws of an earlier pass.
        part: index of the part, if an attention is computed in parts with other queries and keys. Parts have different
            numbers, except for draws of shape ``()`` and ``(H,)``, which hold for all parts.
        first_query: index of the first query in the sequence.
        batch: the samples and tokens of the pass, if numbers are to follow from their indices.
        traced: whether torch compiles or transforms the code that draws; ``None`` finds out.

    Example:
        >>> draws, again = Draws(3), Draws(3)
        >>> first, second = draws.uniform((2, 2)), draws.uniform((2, 2))
        >>> torch.equal(again.uniform((2, 2)), first), torch.equal(first, second)
        (True, False)
    """

    def __init__(
        self,
        seed: int | Tensor | Callable[[], int | Tensor | None] | None = None,
        *,
        replayed: bool = False,
        part: int = 0,
        first_query: int = 0,
        batch: Batch | None = None,
        traced: bool | None = None,
    ) -> None:
        self.replayed = replayed
        self.first_query = first_query
        self._batch = NO_BATCH if batch is None else batch
        self._part = part
        self._traced = traced
        self._seed: Any = seed
        self._count = 0

    @property
    def seed(self) -> int | Tensor | None:
        """The seed, an integer (int64, 0-d, while torch compiles or transforms a function)."""
        seed = self._seed() if callable(self._seed) else self._seed
        self._seed = seed if type(seed) in (int, NoneType) or is_traced() else int(seed)
        return self._seed

    def at(self, *, part: int = 0, first_query: int = 0) -> Draws:
        """Return the source of another part of the same attention, which has the same seed."""
        place: Any = {"part": part, "first_query": first_query, "batch": self._batch}
        return Draws(lambda: self.seed, replayed=self.replayed, traced=self._traced, **place)

    def place(
        self, shape: Sequence[int], by_query: bool | None = None, device: torch.device | None = None
    ) -> dict[str, Any]:
        """Return the first indices of draws of this shape: of queries and keys, and of samples in a larger batch.

        Raises:
            InputError: if draws of this shape do not show their samples.
        """
        batch = self._batch
        if batch is NO_BATCH and not self.first_query:
            return {"first_query": 0, "traced": self._traced}
        by_query = len(shape) > 2 and shape[-2] > 1 if by_query is None else by_query
        samples = batch.rows if len(shape) > 1 else None  # a draw of one dimension is for the whole batch
        if samples is not None and (shape[0] != len(samples) or len(shape) > 4 or self._part):
            shown = f"Draws of shape {tuple(shape)} do not show {len(samples)} samples"
            raise InputError(f"{shown}: replay the whole batch, without `rows`.")
        offset = batch.cached if len(shape) == 3 else self.first_query
        place: dict[str, Any] = {"first_query": offset if by_query else 0, "samples": samples, "traced": self._traced}
        if (first := batch.first) is not None and len(shape) > 2 and shape[0] == len(first) and not self._part:
            first = first.to(device=device).view(-1, *[1] * (len(shape) - 2))  # padding on the left does not count
            if by_query:
                place["first_query"] = offset - first
            if len(shape) == 4 and shape[3] > 1:
                place["first_key"] = -first
        return place

    def uniform(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        by_query: bool | None = None,
    ) -> Tensor:
        """Draw numbers in ``[0, 1)``, multiples of 2^-24, as ``uniform`` of a site does, on any device."""
        seed = self.next_seed(whole=len(shape) < 2)
        return functional.seeded_uniform(seed, shape, device=device, **self.place(shape, by_query, device)).to(dtype)

    def keep(
        self,
        shape: Sequence[int],
        p: float | Tensor,
        *,
        device: torch.device | None = None,
        by_query: bool | None = None,
    ) -> Tensor:
        """Draw decisions, bool, ``True`` = kept, as ``keep`` of a site does, on any device."""
        seed = self.next_seed(whole=len(shape) < 2)
        return functional.seeded_keep(seed, shape, p, device=device, **self.place(shape, by_query, device))

    def next_seed(self, *, whole: bool = False) -> int | Tensor:
        """Return another seed for every draw, and for every part of an attention unless a draw is for the ``whole``."""
        seed = self._seed if type(self._seed) is int else self.seed
        if seed is None:
            drawn = new_seed()
            return drawn if is_traced() else int(drawn)
        self._count += 1
        if self._part and not whole:
            seed = functional.fold_seed(seed, -self._part)
        return functional.fold_seed(seed, self._count)


class DrawsHere:
    """Base of sites: random numbers and decisions that follow from the seed of the forward pass."""

    shape: tuple[int, ...]
    device: torch.device
    draws: Draws

    def keep(self, p: float | Tensor, shape: Sequence[int] | None = None, *, by_query: bool | None = None) -> Tensor:
        """Draw decisions, bool, ``True`` = kept, which is the case with probability 1 - p.

        Args:
            p: drop probability; a tensor must be 0-d.
            shape: their shape (default: the shape of the site).
            by_query: whether they differ by query (default: if the shape has several queries, or is the site's).
                If so, a pass with a cache of earlier keys continues where the pass before it ended.
        """
        shape, by_query = (self.shape, True) if shape is None else (shape, by_query)
        return self.draws.keep(shape, p, device=self.device, by_query=by_query)

    def uniform(
        self, shape: Sequence[int] | None = None, *, dtype: torch.dtype = torch.float32, by_query: bool | None = None
    ) -> Tensor:
        """Draw numbers in ``[0, 1)``; arguments are as in :meth:`keep`."""
        shape, by_query = (self.shape, True) if shape is None else (shape, by_query)
        return self.draws.uniform(shape, device=self.device, dtype=dtype, by_query=by_query)

    def normal(self, shape: Sequence[int] | None = None, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw numbers of the standard normal distribution, up to 5.4 in size; arguments are as in :meth:`uniform`."""
        middle = self.uniform(shape) + 2.0**-25  # never 0 or 1
        return (math.sqrt(2) * torch.erfinv(2 * middle - 1)).to(dtype)


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples and tokens of one forward pass, by which its tensors get different numbers.

    A tensor has the dimensions ``(B, ...)``, ``(B, C)``, ``(B, T, C)``, ``(B * T, C)``, ``(B, H, Q, K)`` or others; its
    numbers follow from its indices, so that a sample keeps its numbers in a batch of any size and length.
    """

    size: int = 0  # B; 0 if it is not known
    tokens: int = 0  # T, without tokens in a cache
    first: Tensor | None = None  # index of the first token of a sample that is not padding, (B,)
    cached: int = 0  # number of earlier tokens, in a cache
    rooms: Collection[int] = ()  # numbers of keys for which the layers of a static cache have room
    rows: Tensor | None = None  # index of each sample in a larger batch, (B,)
    has_encoder: bool = False  # whether an encoder, which has no cache, may run before a decoder

    def place(
        self, shape: Sequence[int], device: torch.device, *, shared: bool
    ) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
        """Return the dimensions ``(B, H, Q, K)`` of a tensor and their first indices, from which its numbers follow."""
        is_joined = not shared and len(shape) == 2 and shape[0] == self.size * self.tokens > self.size  # as in OPT
        shape = (self.size, self.tokens, shape[1]) if is_joined else shape
        lead, *rest = shape if len(shape) else (1,)
        middle, (keys, *_) = rest[:-1], (*rest[-1:], 1)
        heads = middle[0] if len(middle) == 2 and middle[0] <= MOST_HEADS else 1
        dims = lead, heads, math.prod(middle) // heads, keys
        place: dict[str, Any] = {}
        if self.rows is not None and not shared and len(shape):
            place = {"samples": self.rows} if is_joined else self._of_rows(shape)
        if lead == self.size and not shared and math.prod(rest) > 1 and (self.first is not None or self.cached):
            first = torch.zeros((), dtype=torch.long, device=device) if self.first is None else self.first.to(device)
            first = first.view(-1, 1, 1)
            if dims[2] == self.tokens:
                place["first_query"] = self.cached - first
                if len(shape) == 4 and keys in (self.rooms or [self.tokens + self.cached]):
                    place["first_key"] = -first
        return dims, {name: index.to(device) for name, index in place.items()}

    def _of_rows(self, shape: Sequence[int]) -> dict[str, Any]:
        rows = self.rows
        assert rows is not None
        if shape[0] == self.size and len(shape) > 1 and not (len(shape) == 3 and shape[1] == self.size > 1):
            return {"samples": rows}
        if len(shape) == 3 and shape[1] == self.size != shape[0] == self.tokens:
            return {"first_query": rows - torch.arange(self.size, device=rows.device)}
        raise InputError(
            f"has shape {tuple(shape)}, and it is not known which of its values belong to which of {self.size} samples"
        )


NO_BATCH = Batch()


def new_seed(generator: torch.Generator | None = None) -> Tensor:
    """Draw a seed, int64, 0-d, by default from torch's global generator of the CPU, which checkpoints set back."""
    return torch.randint(2**62, (), generator=generator, device="cpu")


def generator_states() -> dict[str, Any]:
    """Return the states of the global generators, by owner; reading the state of a GPU does not wait for it."""
    on_gpu = torch.cuda.is_initialized() and [generator.get_offset() for generator in torch.cuda.default_generators]
    numpys: Any = np.random.get_state()
    of_torch = {"torch's": torch.get_rng_state().numpy().tobytes(), "torch's CUDA": on_gpu}
    return {**of_torch, "numpy's": (numpys[1].tobytes(), numpys[2]), "Python's": random.getstate()}


_latest: dict[int, Draws | None] = {}  # by thread


def draws_of_pass() -> Draws:
    """Return the source of the forward pass that begins, for ``prepare``; outside of a pass, a new source."""
    return _latest.get(_thread()) or Draws()


@contextmanager
def draws_from(draws: Draws) -> Iterator[None]:
    """Make :func:`draws_of_pass` return a source within the block."""
    thread = _thread()
    outer, _latest[thread] = _latest.get(thread), draws
    try:
        yield
    finally:
        _latest[thread] = outer


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


@dataclass(frozen=True, eq=False)
class Drawn:
    """Decisions that a kernel makes while it computes attention, so that they are never in memory."""

    seed: int | Tensor
    p: float | Tensor  # of dropping; a tensor must be 0-d
    shape: tuple[int, int, int, int]  # (B, H, Q, K), with 1 where positions share a decision
    device: torch.device | None = None
    rescale: bool = False  # divide kept attention weights by 1 - p
    first_query: int | Tensor = 0  # index of the first query in the sequence
    samples: Tensor | None = None  # index of each sample in a larger batch, (B,)
    first_key: Tensor | None = None  # index of the first key
    traced: bool | None = None  # whether torch compiles or transforms the code that draws; `None` finds out

    def written_out(self) -> Tensor:
        """Return the decisions as a tensor, bool, in this shape."""
        place: Any = {"first_query": self.first_query, "samples": self.samples, "first_key": self.first_key}
        return functional.seeded_keep(self.seed, self.shape, self.p, device=self.device, traced=self.traced, **place)

    def factors(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the factors on attention weights, in this shape: bool, or with ``rescale`` of this dtype."""
        keep = self.written_out()
        return keep.to(dtype) / self.divisor if self.rescale else keep

    @property
    def divisor(self) -> float | Tensor:
        """The divisor of kept attention weights."""
        return 1 - self.p + (self.p == 1) if self.rescale else 1.0  # at p = 1 nothing is kept: no 0 / 0

    def of_queries(self, queries: Tensor) -> Tensor:
        """Return the decisions of some queries, ``(B, H, len(queries), K)``."""
        batch, heads, rows, keys = self.shape
        shape = batch, heads, len(queries), keys
        # Row i of the result is query `queries[i]`, but `seeded_keep` counts rows from the first query on.
        first = (queries if rows > 1 else 0) - torch.arange(len(queries), device=queries.device) + self.first_query
        place: Any = {"first_query": first, "samples": self.samples, "first_key": self.first_key}
        return functional.seeded_keep(self.seed, shape, self.p, device=queries.device, **place)

    def keep_at(self) -> KeepAt:
        """Return a function of a sample, head, query and key index, for the score function of a kernel."""
        batch, heads, queries, keys = self.shape
        b, h, q = (torch.arange(size, device=self.device) for size in (batch, heads, queries))
        b = b if self.samples is None else self.samples.to(b.device)
        # The words of a row are in memory, since hashing them takes 64 bits, and the drop rate, since it may change.
        first, second = row_words(self.seed, b[:, None, None], h[:, None], q + self.first_query)
        first = first if self.first_key is None else first + key_steps(self.first_key)
        steps = key_steps(torch.arange(keys, device=self.device))  # the kernel may hold k in 32 or in 64 bits
        # A copy of a number would wait for a GPU.
        p = self.p if isinstance(self.p, Tensor) else torch.full((), self.p, device=self.device)
        p = p.to(self.device, torch.float32)
        # Compiled code with sizes would be compiled again for every length.
        by_sample, by_head, by_query, by_key = batch > 1, heads > 1, queries > 1, keys > 1

        def keep(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            row = (b if by_sample else b * 0), (h if by_head else h * 0), (q if by_query else q * 0)
            return keep_of_rows(first[row], second[row], steps[k if by_key else k * 0], p)

        return keep
