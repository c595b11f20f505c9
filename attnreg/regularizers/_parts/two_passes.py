"""Shared state of regularizers that look at each batch before the training step on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnreg.attribution import Attributions, explain
from attnreg.draws import draws_of_pass
from attnreg.errors import InputError
from attnreg.injection import handle_of
from attnreg.regularizer.base import Regularizer
from attnreg.sites import Site


class TwoPasses:
    """Whether the present forward pass is masked: only the one that follows a first pass is.

    Masks stay until the next forward pass begins or the step ends, so that gradient checkpointing finds them again in
    the backward pass.
    """

    def __init__(self) -> None:
        self._state: Literal["never", "idle", "armed", "masking"] = "never"
        self._batch: dict[str, Tensor] = {}
        self._seed: int | Tensor | None = None  # of the masked pass

    @property
    def masking(self) -> bool:
        """Whether the present forward pass is masked."""
        return self._state == "masking"

    def explain(
        self, provider: Regularizer, model: nn.Module, batch: Mapping[str, Any], labels: Sequence[str], **options: Any
    ) -> Attributions:
        """Make the first pass by :func:`attnreg.attribution.explain`, whose options these are; the next is masked."""
        self.end()
        handle = handle_of(model, provider)
        handle.inputs_of_tapped_pass()  # forgets those of an attribution that failed
        found = explain(model, batch, handle, labels, **options)
        self._state = "armed"
        given = handle.inputs_of_tapped_pass()  # to the attached model, if a wrapper made it of the batch
        known = {**batch, **{name: x for name, x in given.items() if name in batch or not x.is_floating_point()}}
        self._batch = {name: value for name, value in known.items() if isinstance(value, Tensor)}
        return found

    def needs_no_first(self) -> None:
        """Mask the next forward pass on any batch, without a first pass."""
        self._state, self._batch = "armed", {}

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Begin a forward pass in training mode; raise if it is to be masked on another batch than the first pass."""
        draws = draws_of_pass()
        if draws.replayed and self._state != "armed":
            if self._state != "masking" or draws.seed != self._seed:
                raise RuntimeError(
                    "What the masks of that pass were made of is gone: replay the latest pass, before `handle.step()`, "
                    "or call `provider.attribute(model, batch)` again before the replay."
                )
            return
        if self._state == "armed" and self._batch and not torch.compiler.is_compiling():
            _check_same(self._batch, inputs)
        self._batch = {}
        if self._state != "never":
            self._state = "masking" if self._state == "armed" else "idle"
            self._seed = draws.seed if self.masking else None

    def end(self) -> None:
        """End the step, or forget its first pass."""
        self._batch = {}
        if self._state != "never":
            self._state = "idle"

    def check(self, provider: Regularizer) -> None:
        """Raise, before the regularizer returns a mask, if there has never been a first pass."""
        if self._state == "never":
            raise never_attributed(provider)


def check_shape(site: Site, first: Sequence[int], now: Sequence[int]) -> None:
    """Raise if a site has another shape than in the first pass."""
    if tuple(first) != tuple(now):
        raise InputError(
            f"This forward pass is not on the batch that `attribute` looked at: {site.name} has shape {tuple(now)} "
            f"instead of {tuple(first)}; call `attribute` on each batch first."
        )


def never_attributed(provider: Regularizer) -> RuntimeError:
    """Make the error for a training pass without any first pass."""
    return RuntimeError(
        f"{type(provider).__name__} needs `provider.attribute(model, batch)` before each training step: call it, or "
        "train with `attnreg.training.FineTuning` or `attnreg.integrations.RegularizedTrainer`, which do."
    )


def _check_same(batch: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> None:
    both = [name for name, value in inputs.items() if isinstance(value, Tensor) and name in batch]
    for name in both:
        seen, given = batch[name], inputs[name]
        if seen is not given and not (seen.shape == given.shape and torch.equal(seen.to(given.device), given)):
            raise InputError(
                f"This forward pass is not on the batch that `attribute` looked at ({name!r} differs): call "
                "`attribute` on each batch right before the training step on it."
            )
    if not both:
        raise InputError(
            f"Cannot tell whether this forward pass is on the batch that `attribute` looked at, because the inputs "
            f"{sorted(inputs)} and {sorted(batch)} share no name: pass inputs by the same names to both."
        )
