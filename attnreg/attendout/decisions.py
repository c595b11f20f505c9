"""The decisions of a Generator: how many there are, how they are drawn and taken, and their log-probability."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnreg import functional
from attnreg.draws import Draws, draws_of_pass

Granularity = Literal["unit", "key", "batch"]
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
    where the value was drawn from [0, 1], and 0 elsewhere.
    """

    logits: Tensor
    valid: Tensor
    masks: list[Tensor]
    weights: Tensor

    def gradient(self, slopes: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the logits from the slopes of the masks, ``(B, M, N, N)`` for each layer."""
        return torch.stack(list(slopes), 1).sum_to_size(self.logits.shape) * self.weights


@dataclass(frozen=True)
class Decisions:
    """Draw masks from logits, with one decision for each unit, for each key, or for the whole batch.

    A decision that is shared by several units has the mean of their logits. Logits are ``(B, L, G, N, N)``, valid units
    ``(B, N, N)``, masks ``(B, L, M, N, N)``, with ``M = G * draws``.
    """

    each: Granularity
    num_heads: int
    draws: int

    @property
    def _shared_by(self) -> tuple[int, ...]:
        """Dimensions of the logits over which a decision is shared."""
        return {"unit": (), "key": (3,), "batch": (0, 3, 4)}[self.each]

    def draw(self, logits: Tensor, units: Tensor, *, opposite: bool = False) -> list[Tensor]:
        """Draw masks; with ``opposite`` twice, from noise u and from 1 - u."""
        pooled, _ = self.pooled(logits, units)
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
        full = (len(logits), layers, shape[2], *logits.shape[3:])
        return [mask.expand(full) for mask in masks]

    def log_prob(self, logits: Tensor, units: Tensor, keep: Tensor) -> Tensor:
        """Return the mean log-probability of each sample's decisions, ``(B,)``."""
        pooled, valid = self.pooled(logits, units)
        for dim in self._shared_by:  # all units of a decision are alike, so the first tells it
            keep = keep.narrow(dim, 0, 1)
        kept = keep.unflatten(2, (self.num_heads, self.draws)).sum(3)
        return functional.bernoulli_log_prob(pooled, kept, valid, self.draws).expand(len(logits))

    def draw_relaxed(self, logits: Tensor, units: Tensor, share: float) -> Relaxed:
        """Draw decisions, and for a share of them values between 0 and 1."""
        pooled, valid = self.pooled(logits, units)
        each = pooled.repeat_interleave(self.draws, 2)
        draws = draws_of_pass()
        with torch.no_grad():
            keep = functional.sample_keep(each, uniform=_like(each, draws))
            chosen = _like(each, draws) < share
            values = torch.where(chosen, _like(each, draws), keep.to(each.dtype))
            probability = torch.sigmoid(each)
            weights = (probability * (1 - probability) * chosen / share).masked_fill(~valid, 0.0)
        full = values.expand(len(logits), *values.shape[1:3], *logits.shape[3:])
        masks = [layer.clone().requires_grad_() for layer in full.unbind(1)]
        return Relaxed(each, valid.expand(each.shape), masks, weights)

    def probability(self, logits: Tensor, units: Tensor) -> Tensor:
        """Return the probability of keeping each unit, ``(B, L, G, N, N)``."""
        return torch.sigmoid(self.pooled(logits, units)[0]).expand(logits.shape)

    def pooled(self, logits: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the decisions, and which of them are valid."""
        valid = units[:, None, None]
        if not self._shared_by:
            return logits, valid
        count = valid.sum(self._shared_by, keepdim=True)
        total = logits.masked_fill(~valid, 0.0).sum(self._shared_by, keepdim=True)
        return total / count.clamp(min=1), count > 0


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
