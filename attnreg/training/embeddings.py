"""Change the token embeddings of a forward pass, for objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from attnreg.errors import InputError
from attnreg.regularizer.base import Regularizer
from attnreg.regularizers._parts.rounding import Rounding
from attnreg.training.method import Batch
from attnreg.training.objective import Objective


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens that an embedding module has looked up.

    Args:
        real: which are no padding, bool, ``(B, T)``, or ``(T, B)`` in a model that transposes them (XLNet).
        dim: dimension of the tokens, 1 or 0.
    """

    real: Tensor
    dim: int


class EmbeddingObjective(Objective):
    """An objective whose forward passes have other token embeddings."""

    passes = 2

    def __init__(self) -> None:
        self._rounding = Rounding(self.title)

    @override
    def check(self, model: nn.Module, provider: Regularizer | None) -> None:
        super().check(model, provider)
        embeddings_of(model, self.title)


@contextmanager
def changed_embeddings(
    model: nn.Module, batch: Batch, change: Callable[[Tensor, Tokens], Tensor], title: str
) -> Iterator[None]:
    """Replace the embeddings of the batch's tokens, within the block, by what ``change`` makes of them."""
    found = False

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], embedded: Tensor) -> Tensor | None:
        nonlocal found
        tokens = _tokens((*args, *kwargs.values())[0], batch)
        if tokens is None:
            return None  # other tokens, such as those of a decoder
        found = True
        return change(embedded, tokens)

    with ExitStack() as hooks:
        for module in _lookups(model, title):
            hooks.enter_context(module.register_forward_hook(replace, with_kwargs=True))
        yield
    if not found:
        raise InputError(
            f"{title} could not add noise, because {type(model).__name__} did not look up the batch's `input_ids` "
            "in `get_input_embeddings()`. Train with `attnreg.training.RDrop` instead."
        )


def embeddings_of(model: nn.Module, title: str) -> nn.Module:
    """Return the input embeddings of a model, or raise."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        found = get() if callable(get) else None
    except (NotImplementedError, AttributeError):
        found = None
    if not isinstance(found, nn.Module):
        raise InputError(
            f"{title} adds noise to the output of `get_input_embeddings()`, which {type(model).__name__} does not have."
        )
    return found


def check_tokens(batch: Batch, title: str) -> None:
    """Refuse batches whose tokens or padding are not known."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None:
        raise InputError(f"{title} adds noise to token embeddings, but the batch {sorted(batch)} has no `input_ids`.")
    if mask is not None and mask.shape != ids.shape:
        raise InputError(
            f"{title} needs an `attention_mask` of the shape of `input_ids`, {tuple(ids.shape)}, to leave padding as "
            f"it is, got {tuple(mask.shape)}."
        )


def _lookups(model: nn.Module, title: str) -> list[nn.Module]:
    """Return the modules that look tokens up: the input embeddings, and others that share their weight (T5)."""
    first = embeddings_of(model, title)
    inside, weight = set(first.modules()), getattr(first, "weight", None)
    others = (module for module in model.modules() if isinstance(module, nn.Embedding) and module not in inside)
    return [first, *(module for module in others if module.weight is weight)]


def _tokens(ids: Tensor, batch: Batch) -> Tokens | None:
    """Return what looked-up tokens are; ``None`` if they are not those of the batch."""
    given = batch["input_ids"].flatten(0, -2)
    mask = batch.get("attention_mask")
    real = torch.ones_like(given, dtype=torch.bool) if mask is None else mask.flatten(0, -2).bool()
    for tokens, positions, dim in ((given, real, 1), (given.T, real.T, 0)):
        length = tokens.shape[1]
        if ids.dim() == 2 and len(ids) == len(tokens) and torch.equal(ids[:, :length], tokens):
            return Tokens(F.pad(positions, (0, ids.shape[1] - length)), dim)  # Longformer pads inputs further
    return None
