"""The modules at which a forward pass of an attached model may begin."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from attnreg.injection.connection import Connection
from attnreg.injection.rates import in_backward
from attnreg.injection.shadow import Shadow


class AttachedEntry(Shadow[None]):
    """The attached model, or a module in it that contains all its attention. The outermost call begins a pass."""

    def __init__(self, handle: Connection, module: nn.Module, name: str) -> None:
        super().__init__(handle, module, (None,), name)
        self.input_names = list(inspect.signature(type(module).forward).parameters)[1:]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as one forward pass of the model."""
        handle = self.handle
        inputs = {**dict(zip(self.input_names, args, strict=False)), **kwargs}
        if in_backward():  # gradient checkpointing recomputes it
            handle.begin_again(inputs, self.module, self.input_names)
            try:
                return self.plain(*args, **kwargs)
            finally:
                handle.end_again(self.module)
        if handle.in_forward:
            return self.plain(*args, **kwargs)
        try:
            handle.begin(inputs, self.module, self.input_names)
            return self.plain(*args, **kwargs)
        finally:
            handle.end()


def entries(model: nn.Module, around: Sequence[Sequence[nn.Module]]) -> list[nn.Module]:
    """Return the model and the modules in it that contain all chosen attention, outermost first.

    ``around`` has the modules that contain each attention, outermost first; its own module is the last.

    Example:
        >>> bert, layers = nn.Module(), [nn.Module(), nn.Module()]
        >>> entries(model := nn.Module(), [[model, bert, layer] for layer in layers]) == [model, bert]
        True
    """
    shared = []
    for modules in zip(*around, strict=False):
        if any(module is not modules[0] for module in modules):
            break
        shared.append(modules[0])
    return [model, *(module for module in shared if module is not model)]
