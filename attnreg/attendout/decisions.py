"""The decisions of a Generator: their number, how masks are drawn from them, and their log-probability."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

import torch
from torch import Tensor

from attnreg import functional
from attnreg.draws import draws_of_pass

Granularity = Literal["unit", "key", "type", "word", "batch"]
REMEMBERED = 64  # passes
# Dimensions of the logits over which a decision is shared.
SHARED = {"unit": (), "key": (3,), "type": (3,), "word": (1, 3), "batch": (0, 3, 4)}


class Decisions:
    """A Generator's decisions on a batch: one per unit, key or type of key, or for the whole batch.

    With ``"word"``, a type of key has one decision for all layers, with ``"type"`` one per layer. A decision that
    several units share has the mean of their logits.

    Logits are ``(B, L, G, N, N)``, valid units ``(B, N, N)``, the keys' types ``(B, N)``, below ``num_types``, masks
    ``(B, L, M, N, N)``, with ``M = G * draws``. The attributes ``logits`` and ``valid`` belong to the decisions, of
    size 1 where decisions are shared, and by type ``(1, L or 1, G, 1, num_types)``.
    """

    def __init__(
        self,
        granularity: Granularity,
        draws: int,
        logits: Tensor,
        units: Tensor,
        types: Tensor | None = None,
        num_types: int = 0,
    ) -> None:
        self._shared, self._draws, self._types, self._num_types = SHARED[granularity], draws, types, num_types
        self._shape = logits.shape
        self.logits, self.valid = logits, units[:, None, None]
        if self._shared:
            valid = self.valid.expand(-1, logits.shape[1], -1, -1, -1) if granularity == "word" else self.valid
            count = self._total(valid)
            self.logits = self._total(logits.masked_fill(~self.valid, 0.0)) / count.clamp(min=1)
            self.valid = count > 0

    def draw(self) -> Tensor:
        """Draw masks."""
        batch, layers, heads, *rest = self.logits.shape
        keep = self.logits.new_empty((batch, layers, heads * self._draws, *rest), dtype=torch.bool)
        with torch.no_grad():  # not as a decorator, at which torch.compile would break its graph
            for layer in range(layers):  # one layer at a time, because the float noise takes memory
                logits = self.logits[:, layer].repeat_interleave(self._draws, 1)
                uniform = draws_of_pass().uniform(logits.shape, device=logits.device, dtype=logits.dtype)
                keep[:, layer] = functional.sample_keep(logits, uniform)
        return self._by_unit(keep)

    def log_prob(self, keep: Tensor) -> Tensor:
        """Return the mean log-probability of every sample's decisions, ``(B,)``."""
        for dim in self._shared:  # all units of a decision are equal, so the first is enough
            keep = keep.narrow(dim, 0, 1)
        if self._types is not None:
            keep = self._sum_by_type(keep.long(), self._types) > 0
        kept = keep.unflatten(2, (-1, self._draws)).sum(3)
        return functional.bernoulli_log_prob(self.logits, kept, self.valid, self._draws).expand(self._shape[0])

    def probability(self) -> Tensor:
        """Return the units' probabilities of being kept, ``(B, L, G, N, N)``."""
        return self._by_unit(torch.sigmoid(self.logits))

    def _total(self, values: Tensor) -> Tensor:
        """Sum over the units of every decision."""
        total = values.sum(self._shared, keepdim=True) if self._shared else values
        return total if self._types is None else self._sum_by_type(total, self._types)

    def _sum_by_type(self, values: Tensor, types: Tensor) -> Tensor:
        """Sum values of keys, ``(B, L, M, 1, N)``, over the keys of a type, ``(1, L, M, 1, num_types)``."""
        rows = values.movedim(-1, 1).flatten(0, 1)
        total = rows.new_zeros(self._num_types, *rows.shape[1:]).index_add(0, types.flatten(), rows)
        return total.movedim(0, -1)[None]

    def _by_unit(self, values: Tensor) -> Tensor:
        """Expand the values of decisions to their units."""
        if self._types is not None:
            values = values[0][..., self._types].movedim(-2, 0)
        return values.expand(*self._shape[:2], values.shape[2], *self._shape[3:])


def shift_to(probability: float, logits: Tensor) -> float:
    """Return the shift of logits that makes the mean of their probabilities equal to a value."""
    logits, target = logits.double(), math.log(probability / (1 - probability))
    low, high = target - float(logits.max()), target - float(logits.min())
    for _ in range(50):  # bisection, because the mean rises with the shift
        middle = (low + high) / 2
        is_above = float(torch.sigmoid(logits + middle).mean()) > probability
        low, high = (low, middle) if is_above else (middle, high)
    return (low + high) / 2


class PresampledMasks:
    """Tells whether a forward pass uses masks that were drawn before it, or draws masks."""

    def __init__(self) -> None:
        self._is_waiting = self._was_offered = False
        self._seed: int | Tensor | None = None  # seed of the pass that uses the masks, until the next pass
        self._drawing_seeds: deque[int] = deque(maxlen=REMEMBERED)  # seeds of passes that drew masks

    def offer(self) -> None:
        """Offer the masks that were just drawn to the next forward pass."""
        self._is_waiting = self._was_offered = True

    def begin_pass(self) -> bool:
        """Begin a forward pass; return whether it uses the present masks."""
        draws = draws_of_pass()
        if self._is_waiting:
            self._is_waiting, self._seed = False, draws.seed
            return True
        if draws.replayed and draws.seed == self._seed:
            return True
        if self._was_offered and draws.replayed and draws.seed not in self._drawing_seeds:
            raise RuntimeError("The masks that were sampled for that pass are gone: replay only the latest pass.")
        if self._was_offered and isinstance(draws.seed, int) and not draws.replayed:
            self._drawing_seeds.append(draws.seed)
        self._seed = None
        return False
