"""Replace the forward of a module, and restore it: of any, and of those at which a pass may begin."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import nn

from attnreg.errors import NoAttentionError
from attnreg.injection.running.connection import Connection
from attnreg.injection.running.rates import in_backward

MARK = "_attnreg"
What = TypeVar("What")


class Shadow(ABC, Generic[What]):
    """Replaces the ``forward`` of one module instance.

    Hooks would not work: any hook on a child of ``nn.TransformerEncoderLayer`` switches off its fast path, so that eval
    mode would no longer be bitwise the plain model. And no hook runs after a ``KeyboardInterrupt``, so a mode would
    stay on.

    Args:
        handle: the connection to the provider.
        module: the module.
        whats: a record for each of the module's calls in one forward pass of the model; ``None`` for a call that runs
            unchanged. There is more than one if layers share the module (ALBERT).
        name: name of the module, for messages.
    """

    def __init__(self, handle: Connection, module: nn.Module, whats: Sequence[What | None], name: str) -> None:
        self.handle = handle
        self.module = module
        self.whats = tuple(whats)
        self.name = name
        self._calls = 0
        self._ran: list[int] = []  # the calls that were not passed over, in order
        self._shadowed: Any = None

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's forward."""

    def install(self) -> None:
        """Replace the module's forward, which may already be replaced."""
        self._shadowed = self.module.__dict__.get("forward")
        setattr(self.module, MARK, self)
        forward = functools.partial(_forward, self)
        forward.__wrapped__ = self.module.forward  # type: ignore[attr-defined]  # for inspect.signature
        self.module.forward = forward

    def remove(self) -> None:
        """Restore the module's forward."""
        forward = self.module.__dict__.get("forward")
        if isinstance(forward, functools.partial) and forward.args and forward.args[0] is self:
            if self._shadowed is None:
                del self.module.forward
            else:
                self.module.forward = self._shadowed
        self.whats = (None,)  # if something else has wrapped the forward since, it now calls the plain one
        self.module.__dict__.pop(MARK, None)

    def begin(self) -> None:
        """Begin a forward pass of the model."""
        self._calls, self._ran = 0, []

    def pass_over(self) -> None:
        """Count the next call of the module as done; its block is skipped in this forward pass."""
        self._calls += 1

    def next(self) -> What | None:
        """Return the record of the call that begins now; raise if there are more calls than when it was attached."""
        if self.handle.in_forward:
            call = self._calls
            self._calls += 1
            if call >= len(self.whats):
                if not any(self.whats):
                    return None
                raise NoAttentionError(
                    f"{self.name} is called more often in this forward pass than when it was attached "
                    f"(calls then: {len(self.whats)}). Attach with `example_inputs` like these inputs."
                )
            self._ran.append(call)
            return self.whats[call]
        if len(self.whats) == 1:
            return self.whats[0]
        if self._ran and in_backward():
            # Gradient checkpointing recomputes a shared module's calls during the backward pass, last call first. After
            # the first call comes the last again, for a second backward pass.
            self._ran = [self._ran[-1], *self._ran[:-1]]
            return self.whats[self._ran[0]]
        call = self._calls % len(self.whats)
        self._calls += 1
        return self.whats[call]

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self._shadowed is not None:
            return self._shadowed(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


# Shadows are partials of a module-level function: closures could be neither pickled nor copied.
def _forward(shadow: Shadow[Any], *args: Any, **kwargs: Any) -> Any:
    if args and args[0] is shadow.module:
        args = args[1:]  # accelerate turns the forward into a bound method
    return shadow.forward(*args, **kwargs)


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
