"""Notice modules that were replaced since the model was attached, and attention that never runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from attnreg.errors import CoverageWarning, NoAttentionError, listed
from attnreg.injection.discovery.blocks import LISTS
from attnreg.regularizer.abilities import PATIENCE

AGAIN = "Call `handle.detach()`, then `attach` again"


class Changes:
    """Raises if masked modules or the modules around them were replaced, and warns of masked modules that never run.

    ``masked`` are the replaced forwards of masked modules.
    """

    def __init__(self, model: nn.Module, masked: Sequence[Any], names: Mapping[nn.Module, str]) -> None:
        self._masked = tuple(masked)
        self._watched = self._silent = tuple(masked)  # modules without a warning so far; those that have not run lately
        self._passes = 0
        self._lists: dict[nn.Module, tuple[str, int]] = {}
        self._places: dict[tuple[nn.Module, str], nn.Module] = {}
        for replaced in masked:
            parent = model
            for key in names[replaced.module].split(".") if replaced.module is not model else ():
                if isinstance(parent, LISTS):
                    self._lists[parent] = names[parent], len(parent._modules)
                child = parent._modules.get(key)
                assert child is not None
                self._places[parent, key] = child
                parent = child
        self._names = {module: names[module] for module in self._places.values()}

    def check_modules(self) -> None:
        """Raise if a module was replaced, or if a list of blocks has another length than before."""
        for (parent, key), child in self._places.items():
            if key not in parent._modules or parent._modules[key] is not child:
                raise NoAttentionError(f"{self._names[child]} was replaced after it was attached. {AGAIN}.")
        for blocks, (name, count) in self._lists.items():
            if (now := len(blocks._modules)) != count:
                raise NoAttentionError(f"{name} had {count} entries when it was attached, and has {now} now. {AGAIN}.")

    def check_forwards(self, acts_on: Callable[[nn.Module], bool]) -> None:
        """Raise if a module that would be masked did not run, because its forward was replaced."""
        for masked in self._masked:
            if not masked.calls.done and acts_on(masked.module) and not is_installed(masked):
                raise NoAttentionError(
                    f"{masked.name} was not masked, because its `forward` was replaced after it was attached. {AGAIN}."
                )

    def check_ran(self, acts_on: Callable[[nn.Module], bool]) -> None:
        """Raise if a module did not run in the present pass, because its forward was replaced, or not often enough.

        Warn of modules that have not run in the latest passes, as after a change of adapters. ``acts_on`` tells whether
        a module would have been masked.
        """
        for masked in self._masked:
            calls = masked.calls
            if 0 < calls.done < calls.number and masked.calls_differ and acts_on(masked.module):
                raise NoAttentionError(
                    f"{masked.name} is called {calls.done} times in this forward pass, but was called "
                    f"{calls.number} times when it was attached, so it is unknown which of these calls to mask. "
                    "Attach with `example_inputs` like these inputs, or to all layers and stacks."
                )
        self.check_forwards(acts_on)
        self._silent = tuple(masked for masked in self._silent if not masked.calls.done and acts_on(masked.module))
        self._passes += 1
        if self._passes % PATIENCE:
            return
        if self._silent:
            names = listed([masked.name for masked in self._silent], 4)
            warnings.warn(
                f"{len(self._silent)} masked module(s) did not run in {PATIENCE} training passes: {names}. If you "
                "train without them, choose the others with `modules=...`; if not, attach with `example_inputs` like "
                "those that you train on.",
                CoverageWarning,
                stacklevel=2,
            )
            self._watched = tuple(masked for masked in self._watched if masked not in self._silent)
        self._silent = self._watched


def is_installed(masked: Any) -> bool:
    """Whether the forward of a module is the one that was installed, or wraps it, as ``functools`` or accelerate do."""
    forward = masked.module.__dict__.get("forward")
    while forward is not None and forward is not masked.installed:
        forward = getattr(forward, "__wrapped__", None) or getattr(forward, "func", None)
    return forward is not None or any(value is masked.installed for value in vars(masked.module).values())
