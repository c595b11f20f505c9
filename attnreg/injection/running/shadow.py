"""Replace the forward of a module, and restore it: of any, and of those at which a pass may begin."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import nn

from attnreg.errors import NoAttentionError
from attnreg.injection.running.passes import Passes
from attnreg.injection.running.repetition import in_backward

MARK = "_attnreg"
What = TypeVar("What")


class Shadow(ABC, Generic[What]):
    """Replaces the ``forward`` of one module instance.

    Hooks would not work: any hook on a child of ``nn.TransformerEncoderLayer`` switches off its fast path, so that eval
    mode would no longer be bitwise the plain model. And no hook runs after a ``KeyboardInterrupt``, so a mode would
    stay on.

    Args:
        passes: the forward passes of the attached model.
        module: the module.
        whats: a record for each of the module's calls in one forward pass of the model; ``None`` for a call that runs
            unchanged. There is more than one if layers share the module (ALBERT).
        name: name of the module, for messages.
    """

    def __init__(self, passes: Passes, module: nn.Module, whats: Sequence[What | None], name: str) -> None:
        self.passes = passes
        self.module = module
        self.whats = tuple(whats)
        self.name = name
        self.calls = passes.counted(len(self.whats))
        self._shadowed: Any = None

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's forward."""

    def install(self, handle: object) -> None:
        """Replace the module's forward, which may already be replaced, and mark the module with the handle."""
        self._shadowed = self.module.__dict__.get("forward")
        setattr(self.module, MARK, handle)
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

    def next(self) -> What | None:
        """Return the record of the call that begins now; raise if there are more calls than when it was attached."""
        if not any(self.whats):
            return None
        call = self.calls.next(in_forward=self.passes.in_forward)
        if call >= len(self.whats):
            raise NoAttentionError(
                f"{self.name} is called more often in this forward pass than when it was attached "
                f"(calls then: {len(self.whats)}). Attach with `example_inputs` like these inputs."
            )
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

    def __init__(self, passes: Passes, module: nn.Module, name: str) -> None:
        super().__init__(passes, module, (None,), name)
        self._names = input_names(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as one forward pass of the model."""
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        passes = self.passes
        if in_backward():  # gradient checkpointing recomputes it
            with passes.repeated(inputs, self.module, self._names):
                return self.plain(*args, **kwargs)
        if passes.in_forward:
            return self.plain(*args, **kwargs)
        try:
            passes.begin(inputs, self.module, self._names)
            return self.plain(*args, **kwargs)
        finally:
            passes.end()


def input_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward.

    Example:
        >>> input_names(nn.Linear(1, 1))
        ['input']
    """
    return list(inspect.signature(type(module).forward).parameters)[1:]


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
