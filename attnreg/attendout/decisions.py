"""The decisions of a Generator: how many there are, how they are drawn and taken, and their log-probability."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnreg import functional
from attnreg.draws import Draws, draws_of_pass

Granularity = Literal["unit", "key", "type", "word", "batch"]
REMEMBERED = 64  # passes


@dataclass(frozen=True)
class Relaxed:
    r"""Hard decisions, of which a random share is replaced by values drawn evenly from [0, 1].

    For a function f of one decision d, with :math:`P(d = 1) = \sigma(\phi)`,

    .. math:: \frac{\partial}{\partial \phi} E_d[f(d)] = \sigma'(\phi) \, (f(1) - f(0))
              = \sigma'(\phi) \int_0^1 f'(m) \, dm,

    so that the slope at an evenly drawn m estimates the gradient of the hard decision, without bias as far as the
    other decisions are hard, too.

    ``logits`` are :math:`\phi`, with the Generator's graph, for each draw; ``valid`` has their shape. ``masks`` are the
    values of each layer, ``(B, M, N, N)``, leaves of the graph. ``weights`` are :math:`\sigma'(\phi)` over the share
    where the value was drawn from [0, 1], and 0 elsewhere. ``total`` sums over the units of each decision.
    """

    logits: Tensor
    valid: Tensor
    masks: list[Tensor]
    weights: Tensor
    total: Callable[[Tensor], Tensor]

    def gradient(self, slopes: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the logits from the slopes of the masks, ``(B, M, N, N)`` for each layer."""
        return self.total(torch.stack(list(slopes), 1)) * self.weights


@dataclass(frozen=True)
class Decisions:
    """Draw masks from logits, with one decision for each unit, key or type of key, or for the whole batch.

    With ``"word"``, a type of key has one decision for all layers, with ``"type"`` one for each.

    A decision that is shared by several units has the mean of their logits. Logits are ``(B, L, G, N, N)``, valid units
    ``(B, N, N)``, the keys' types ``(B, N)``, below ``num_types``, masks ``(B, L, M, N, N)``, with ``M = G * draws``.
    Pooled logits have size 1 where a decision is shared; those of types are ``(1, L or 1, G, 1, num_types)``.
    """

    each: Granularity
    num_heads: int
    draws: int
    num_types: int = 0

    @property
    def _shared_by(self) -> tuple[int, ...]:
        """Dimensions of the logits over which a decision is shared."""
        return {"unit": (), "key": (3,), "type": (3,), "word": (1, 3), "batch": (0, 3, 4)}[self.each]

    def draw(
        self, logits: Tensor, units: Tensor, types: Tensor | None = None, *, opposite: bool = False
    ) -> list[Tensor]:
        """Draw masks; with ``opposite`` twice, from noise u and from 1 - u."""
        pooled, _ = self.pooled(logits, units, types)
        batch, layers, heads, *rest = pooled.shape
        shape = (batch, layers, heads * self.draws, *rest)
        source = draws_of_pass()
        masks = [pooled.new_empty(shape, dtype=torch.bool) for _ in range(1 + opposite)]
        for layer in range(layers):  # one layer at a time, because the float noise takes memory
            each = pooled[:, layer].repeat_interleave(self.draws, 1)
            uniform = _like(each, source)
            if opposite:
                masks[0][:, layer], masks[1][:, layer] = functional.opposite_draws(each, uniform)
            else:
                masks[0][:, layer] = functional.sample_keep(each, uniform=uniform)
        return [self._of_units(mask, logits, types) for mask in masks]

    def log_prob(self, logits: Tensor, keep: Tensor, units: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the mean log-probability of each sample's decisions, ``(B,)``."""
        pooled, valid = self.pooled(logits, units, types)
        for dim in self._shared_by:  # all units of a decision are alike, so the first tells it
            keep = keep.narrow(dim, 0, 1)
        if types is not None:
            keep = self._of_types(keep.long(), types) > 0
        kept = keep.unflatten(2, (self.num_heads, self.draws)).sum(3)
        return functional.bernoulli_log_prob(pooled, kept, valid, self.draws).expand(len(logits))

    def draw_relaxed(self, logits: Tensor, units: Tensor, types: Tensor | None = None, *, share: float) -> Relaxed:
        """Draw decisions, and for a share of them values between 0 and 1."""
        pooled, valid = self.pooled(logits, units, types)
        each = pooled.repeat_interleave(self.draws, 2)
        draws = draws_of_pass()
        with torch.no_grad():
            keep = functional.sample_keep(each, uniform=_like(each, draws))
            chosen = _like(each, draws) < share
            values = torch.where(chosen, _like(each, draws), keep.to(each.dtype))
            probability = torch.sigmoid(each)
            weights = (probability * (1 - probability) * chosen / share).masked_fill(~valid, 0.0)
        full = self._of_units(values, logits, types)
        masks = [layer.clone().requires_grad_() for layer in full.unbind(1)]
        return Relaxed(each, valid.expand(each.shape), masks, weights, lambda slopes: self._total(slopes, types))

    def probability(self, logits: Tensor, units: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the probability of keeping each unit, ``(B, L, G, N, N)``."""
        return self._of_units(torch.sigmoid(self.pooled(logits, units, types)[0]), logits, types)

    def pooled(self, logits: Tensor, units: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits of the decisions, and which of them are valid."""
        valid = units[:, None, None]
        if not self._shared_by:
            return logits, valid
        count = self._total(valid.expand(-1, logits.shape[1], -1, -1, -1) if self.each == "word" else valid, types)
        return self._total(logits.masked_fill(~valid, 0.0), types) / count.clamp(min=1), count > 0

    def _total(self, values: Tensor, types: Tensor | None) -> Tensor:
        """Sum over the units of each decision."""
        total = values.sum(self._shared_by, keepdim=True) if self._shared_by else values
        return total if types is None else self._of_types(total, types)

    def _of_types(self, of_keys: Tensor, types: Tensor) -> Tensor:
        """Sum values of keys, ``(B, L, M, 1, N)``, over the keys of each type, ``(1, L, M, 1, num_types)``."""
        rows = of_keys.movedim(-1, 1).flatten(0, 1)
        total = rows.new_zeros(self.num_types, *rows.shape[1:]).index_add(0, types.flatten(), rows)
        return total.movedim(0, -1)[None]

    def _of_units(self, pooled: Tensor, logits: Tensor, types: Tensor | None) -> Tensor:
        """Give each unit, of those of the logits, the value of its decision."""
        if types is not None:
            pooled = pooled[0][..., types].movedim(-2, 0)
        return pooled.expand(*logits.shape[:2], pooled.shape[2], *logits.shape[3:])


def _like(logits: Tensor, draws: Draws) -> Tensor:
    return draws.uniform(logits.shape, device=logits.device, dtype=logits.dtype)


def shift_to(probability: float, logits: Tensor) -> float:
    """Return the shift of logits that makes the mean of their probabilities equal to a value."""
    logits, wanted = logits.double(), math.log(probability / (1 - probability))
    low, high = wanted - float(logits.max()), wanted - float(logits.min())
    for _ in range(50):  # the mean rises with the shift, so it is found by bisection
        middle = (low + high) / 2
        enough = float(torch.sigmoid(logits + middle).mean()) > probability
        low, high = (low, middle) if enough else (middle, high)
    return (low + high) / 2


class GivenMasks:
    """Whether a forward pass takes masks that were drawn before it, or draws its own."""

    def __init__(self) -> None:
        self._waiting = False
        self._ever = False
        self._seed: int | Tensor | None = None  # of the pass that took them, as long as they are there
        self._own: deque[int] = deque(maxlen=REMEMBERED)  # seeds of passes that drew their own

    def give(self) -> None:
        """Give the next forward pass the masks that were just drawn."""
        self._waiting = self._ever = True

    def taken(self) -> bool:
        """Begin a forward pass; return whether it takes the masks that are there."""
        draws = draws_of_pass()
        if self._waiting:
            self._waiting, self._seed = False, draws.seed
            return True
        if not draws.replayed:
            self._seed = None
            if self._ever and isinstance(draws.seed, int):
                self._own.append(draws.seed)
            return False
        if self._seed != draws.seed and self._ever and draws.seed not in self._own:
            raise RuntimeError("The masks that were sampled for that pass are gone: replay only the latest pass.")
        if self._seed == draws.seed:
            return True
        self._seed = None
        return False
