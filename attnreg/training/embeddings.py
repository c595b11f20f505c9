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
        real: which are no padding, bool, ``(B, T, 1)``, or ``(T, B, 1)`` in a model that transposes them (XLNet).
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
        self._embeddings_of(model)

    def check_tokens(self, batch: Batch) -> None:
        """Refuse batches whose tokens or padding are not known."""
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if ids is None:
            raise InputError(
                f"{self.title} adds noise to token embeddings, but the batch {sorted(batch)} has no `input_ids`."
            )
        if mask is not None and mask.shape != ids.shape:
            raise InputError(
                f"{self.title} needs an `attention_mask` of the shape of `input_ids`, {tuple(ids.shape)}, to leave "
                f"padding as it is, got {tuple(mask.shape)}."
            )

    @contextmanager
    def noised(self, model: nn.Module, batch: Batch, noise: Callable[[Tensor, Tokens], Tensor]) -> Iterator[None]:
        """Add noise to the embeddings of the batch's tokens, within the block, given the embeddings and the tokens."""
        found = False

        def add(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], embedded: Tensor) -> Tensor | None:
            nonlocal found
            tokens = _tokens((*args, *kwargs.values())[0], batch)
            if tokens is None:
                return None  # other tokens, such as those of a decoder
            found = True
            return self._rounding.add(embedded, noise(embedded, tokens))

        with ExitStack() as hooks:
            for module in self._lookups(model):
                hooks.enter_context(module.register_forward_hook(add, with_kwargs=True))
            yield
        if not found:
            raise InputError(
                f"{self.title} could not add noise, because {type(model).__name__} did not look up the batch's "
                "`input_ids` in `get_input_embeddings()`. Train with `attnreg.training.RDrop` instead."
            )

    def _lookups(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that look tokens up: the input embeddings, and others that share their weight (T5)."""
        first = self._embeddings_of(model)
        inside, weight = set(first.modules()), getattr(first, "weight", None)
        others = (module for module in model.modules() if isinstance(module, nn.Embedding) and module not in inside)
        return [first, *(module for module in others if module.weight is weight)]

    def _embeddings_of(self, model: nn.Module) -> nn.Module:
        try:
            found = getattr(model, "get_input_embeddings", lambda: None)()
        except (NotImplementedError, AttributeError):
            found = None
        if not isinstance(found, nn.Module):
            raise InputError(
                f"{self.title} adds noise to the output of `get_input_embeddings()`, which {type(model).__name__} does "
                "not have."
            )
        return found


def _tokens(ids: Tensor, batch: Batch) -> Tokens | None:
    """Return what looked-up tokens are; ``None`` if they are not those of the batch."""
    given = batch["input_ids"].flatten(0, -2)
    mask = batch.get("attention_mask")
    real = torch.ones_like(given, dtype=torch.bool) if mask is None else mask.flatten(0, -2).bool()
    for tokens, positions, dim in ((given, real, 1), (given.T, real.T, 0)):
        length = tokens.shape[1]
        if ids.dim() == 2 and len(ids) == len(tokens) and torch.equal(ids[:, :length], tokens):
            padded = F.pad(positions, (0, ids.shape[1] - length))  # Longformer pads inputs further
            return Tokens(padded[..., None], dim)
    return None
