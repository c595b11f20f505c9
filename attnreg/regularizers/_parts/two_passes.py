"""Regularizers that look at every batch in a first pass, before the training step on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg.attribution import Attributions, Target, explain
from attnreg.draws import draws_of_pass
from attnreg.errors import InputError
from attnreg.injection import handle_of
from attnreg.regularizer.base import Regularizer
from attnreg.sites import Site, SiteInfo


class TwoPasses(Regularizer):
    """A regularizer that looks at a batch in a first pass, and masks only the forward pass that follows it.

    Masks stay until the next forward pass begins or the step ends, so that gradient checkpointing can read them in the
    backward pass. A subclass makes its first pass in ``attribute``, by :meth:`_explain`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[str, tuple[Tensor, int]] | None = None  # inputs of the pass to mask, with their versions
        self._masking: bool | None = None  # whether the present pass is masked; `None` before any first pass
        self._seed: int | Tensor | None = None  # seed of the masked pass
        self._labels: list[str] = []  # labels of the attributed sites

    @property
    @override
    def draws_in_prepare(self) -> bool:
        return self.looks_at_batches

    @property
    def _score(self) -> Target:
        """The score that the first pass explains."""
        return Target()

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        self._pending, self._masking = None, None  # an earlier first pass was of another model
        self._labels = [site.label for site in sites]
        if self.looks_at_batches:
            self._score.for_model(model)  # raises if the model has no such score

    def _explain(self, model: nn.Module, batch: Mapping[str, Any], **options: Any) -> Attributions:
        """Make the first pass by :func:`attnreg.attribution.explain`, with its options; the next pass is masked."""
        self.step()
        handle = handle_of(model, self)
        handle.inputs_of_tapped_pass()  # forgets the inputs of an attribution that failed
        attributions = explain(model, batch, handle, self._labels, target=self._score, **options)
        tapped = handle.inputs_of_tapped_pass()  # a wrapper may derive these from the batch
        inputs = {**batch, **{name: x for name, x in tapped.items() if name in batch or not x.is_floating_point()}}
        self._mask_next_pass({name: value for name, value in inputs.items() if isinstance(value, Tensor)})
        return attributions

    def _mask_next_pass(self, inputs: dict[str, Tensor]) -> None:
        """Mask the next forward pass, which must have these inputs."""
        self._pending = {name: (value, _version(value)) for name, value in inputs.items()}
        self._masking = False

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        draws = draws_of_pass()
        if draws.replayed and self._pending is None:
            if not self._masking or draws.seed != self._seed:
                raise RuntimeError(
                    "The attributions of that pass are gone: replay the latest pass, before `handle.step()`, "
                    "or call `provider.attribute(model, batch)` again before the replay."
                )
            return
        if self._pending and not torch.compiler.is_compiling():
            _check_same_batch(self._pending, inputs)
        if self._masking is not None:
            self._pending, self._masking = None, self._pending is not None
            self._seed = draws.seed if self._masking else None

    @override
    def step(self) -> None:  # also forgets a first pass
        self._pending, self._masking = None, None if self._masking is None else False

    def _is_masked(self) -> bool:
        """Return whether the present forward pass is masked; raise if there has never been a first pass."""
        if self._masking is None:
            raise never_attributed(self)
        return self._masking


def check_shape(site: Site, first: Sequence[int], present: Sequence[int]) -> None:
    """Raise if a site has another shape than in the first pass."""
    if tuple(first) != tuple(present):
        raise InputError(
            f"This forward pass is not on the batch that `attribute` looked at: {site.name} has shape {tuple(present)} "
            f"instead of {tuple(first)}; call `attribute` on every batch first."
        )


def never_attributed(provider: Regularizer) -> RuntimeError:
    """Return the error for a training pass without any first pass."""
    return RuntimeError(
        f"{type(provider).__name__} needs `provider.attribute(model, batch)` before each training step: call it, "
        "train with `attnreg.training.FineTuning`, or compute the loss by `compute_loss` of "
        "`attnreg.integrations.RegularizedTrainer`; these do it."
    )


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def _check_same_batch(batch: Mapping[str, tuple[Tensor, int]], inputs: Mapping[str, Any]) -> None:
    shared = [name for name, value in inputs.items() if isinstance(value, Tensor) and name in batch]
    for name in shared:
        (first, version), present = batch[name], inputs[name]
        is_same = first is present or (first.shape == present.shape and torch.equal(first.to(present.device), present))
        if not is_same or _version(first) != version:
            raise InputError(
                f"This forward pass is not on the batch that `attribute` looked at ({name!r} differs): call "
                "`attribute` on every batch right before the training step on it."
            )
    if not shared:
        raise InputError(
            f"Cannot tell whether this forward pass is on the batch that `attribute` looked at, because the inputs "
            f"{sorted(inputs)} and {sorted(batch)} share no name: pass inputs by the same names to both."
        )
