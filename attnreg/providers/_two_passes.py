"""What providers share that look at each batch before it is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from attnreg.errors import InputError
from attnreg.provider.base import MaskProvider


class TwoPasses:
    """Where a provider stands: masks hold for the one forward pass that follows a first pass.

    They hold until the next forward pass begins or the step ends, so gradient checkpointing meets them again in the
    backward pass.

    Example:
        >>> passes, batch = TwoPasses(), {"x": torch.ones(2)}
        >>> passes.made_first(batch)
        >>> passes.begin_forward(batch)
        >>> passes.masking
        True
        >>> passes.begin_forward(batch)
        >>> passes.masking
        False
    """

    def __init__(self) -> None:
        self._state: Literal["never", "idle", "armed", "masking"] = "never"
        self._batch: dict[str, Tensor] = {}

    @property
    def masking(self) -> bool:
        """Whether the present forward pass is to be masked."""
        return self._state == "masking"

    def made_first(self, batch: Mapping[str, Any]) -> None:
        """The first pass is made on a batch: the next forward pass, which must be on the same, is masked."""
        self._state = "armed"
        self._batch = {name: value for name, value in batch.items() if isinstance(value, Tensor)}

    def needs_no_first(self) -> None:
        """There is nothing to look at: the next forward pass is masked, whatever it is on."""
        self._state = "armed"
        self._batch = {}

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """A forward pass of the model in training mode begins.

        Raises:
            InputError: if it is to be masked, and on another batch than the first pass.
        """
        if self._state == "armed" and self._batch and not torch.compiler.is_compiling():
            _check_same(self._batch, inputs)
        self._batch = {}
        if self._state != "never":
            self._state = "masking" if self._state == "armed" else "idle"

    def end(self) -> None:
        """The step is over, or its first pass is forgotten."""
        self._batch = {}
        if self._state != "never":
            self._state = "idle"

    def check(self, provider: MaskProvider) -> None:
        """Called when the provider is asked for a mask.

        Raises:
            RuntimeError: if there has never been a first pass.
        """
        if self._state == "never":
            raise RuntimeError(
                "Expected `provider.attribute(model, batch)` before a training step under "
                f"{type(provider).__name__}, found it was never called: call it, or train with "
                "`attnreg.training.TwoPass` or `attnreg.integrations.ADDropTrainer`, which do."
            )


def _check_same(batch: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> None:
    both = [name for name, value in inputs.items() if isinstance(value, Tensor) and name in batch]
    for name in both:
        seen, given = batch[name], inputs[name]
        if seen is not given and not (seen.shape == given.shape and torch.equal(seen.to(given.device), given)):
            raise InputError(
                f"This forward pass is on another batch than `attribute` looked at ({name!r} differs): call "
                "`attribute` on each batch right before the training step on it."
            )
    if not both:
        raise InputError(
            f"`attribute` looked at {sorted(batch)}, and this forward pass is on {sorted(inputs)}, so it cannot be "
            "told whether the batch is the same: pass the model's inputs by the same names to both."
        )
