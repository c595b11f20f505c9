"""Attention written out: scores, softmax, product with the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import functional
from attnreg.injection.layout import FORBIDDEN_BELOW, batch_and_heads

if TYPE_CHECKING:
    from attnreg.injection.mode import AttentionMode

FUNCTIONS = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


def scores_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first argument, whatever its name."""
    return args[0] if args else kwargs["input"]


def is_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a softmax can be one over attention scores: over the last of at least four dimensions.

    Three dimensions are taken for ``(B * H, Q, K)`` if they are square or the first is not 1 (the batch size of the
    discovery run), and for token-level probabilities otherwise.
    """
    scores = scores_of(args, kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim not in (-1, scores.dim() - 1):
        return False
    return scores.dim() >= 4 or (scores.dim() == 3 and (scores.shape[1] == scores.shape[2] or scores.shape[0] != 1))


def allowed(scores: Tensor) -> Tensor:
    """The positions that the model's own additive mask leaves open."""
    return scores.detach() > FORBIDDEN_BELOW


def intercept(mode: AttentionMode, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Softmax over attention scores, with the provider's mask."""
    scores = scores_of(args, kwargs)
    if scores.dim() < (3 if mode.flat else 4) or not is_attention(args, kwargs):
        return func(*args, **kwargs)  # three dimensions elsewhere are gates and class probabilities
    shape = (*batch_and_heads(scores.shape[:-2], mode.batch_size), *scores.shape[-2:])
    valid = allowed(scores).reshape(shape)
    mask = mode.ask(shape, valid, like=scores)
    if mask is None:
        weights = func(*args, **kwargs)
        return weights if mode.tap is None else mode.tap(weights.reshape(shape)).reshape(weights.shape)
    if mask.scores is not None:
        scores = functional.masked_scores(scores.reshape(shape), mask.scores, valid).reshape(scores.shape)
    rest = {name: value for name, value in kwargs.items() if name != "input"}
    weights = func(scores, *args[1:], **rest)
    return mask.of_weights(weights.reshape(shape), valid).reshape(weights.shape)
