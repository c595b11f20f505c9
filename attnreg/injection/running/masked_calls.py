"""What was masked in a forward pass, so that gradient checkpointing repeats it as it was."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnreg.injection.running.repetition import Computations, checkpoint_hook, mark, reentrant_checkpoint, waiting
from attnreg.regularizer.base import Regularizer


@dataclass(frozen=True)
class MaskedCall:
    """Whether one call of a module was masked in a checkpoint."""

    acts: bool  # whether it was
    state: tuple[Any, ...]  # what masks depend on besides the seed
    # the checkpoint, which lives as long as it waits for its backward pass
    checkpoint: weakref.ref[Any] | None = field(default=None, compare=False)


class MaskedCalls:
    """Whether the calls of modules that gradient checkpointing will repeat were masked."""

    def __init__(self, provider: Regularizer) -> None:
        self._provider = provider
        self._done: Computations[MaskedCall] = Computations()

    def note(self, place: Hashable, module: nn.Module, *, acts: bool, has_gradients: bool) -> None:
        """Note whether a call of a module is masked, if a checkpoint runs it in a pass with gradients."""
        if torch.compiler.is_compiling() or not has_gradients:
            return
        around = checkpoint_hook() if torch.is_grad_enabled() else reentrant_checkpoint()
        if around is not None or not torch.is_grad_enabled():
            checkpoint = None if around is None else weakref.ref(around)
            self._done.note(place, mark(), MaskedCall(acts, self._state(module), checkpoint))

    def again(self, place: Hashable, name: str, module: nn.Module, *, acts: bool) -> bool:
        """Return whether a call that is repeated now was masked; ``acts`` is whether it would be now.

        Raises:
            RuntimeError: if it is not known, or the masks would be others.
        """
        found, is_marked = self._done.candidates(place)
        found = found if is_marked else waiting(found)
        if len({each.what for each in found}) != 1:
            if not found and not acts and not self.waits():
                return False
            raise RuntimeError(
                f"Gradient checkpointing repeats {name}, but it is not known whether it was masked: its forward pass "
                "began without gradients, or before `attach` or `handle.step()`, or is one of several. Run each "
                "backward pass before these and before the next forward pass, and use `use_reentrant=False`."
            )
        for each in found:
            each.repeated = True
        was = found[0].what
        if was.acts and was.state != self._state(module):
            raise RuntimeError(
                f"Gradient checkpointing cannot repeat the masks of {type(self._provider).__name__} at {name}, because "
                "its settings or epoch, or the training mode, have changed since the forward pass. Run the backward "
                "pass before `eval()`, `on_epoch()` and new rates."
            )
        return was.acts

    def waits(self) -> bool:
        """Whether any checkpoint that was masked waits for its backward pass."""
        return self._done.waits(_is_masked_and_alive)

    def forget(self) -> None:
        """Forget all passes, because the step is done."""
        self._done.forget(_is_masked_and_alive)

    def _state(self, module: nn.Module) -> tuple[Any, ...]:
        settings = (
            (name, value)
            for each in self._provider.parts()
            for name, value in vars(each).items()
            if name == "training" or (name[0] != "_" and isinstance(value, (bool, int, float, str)))
        )
        return module.training, self._provider.active, *settings


def _is_masked_and_alive(was: MaskedCall) -> bool:
    return was.acts and was.checkpoint is not None and was.checkpoint() is not None
