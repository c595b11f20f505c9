"""Replace the forward of a module, and restore it: of any module, and of modules at which a pass may begin."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from attnreg.errors import InputError, NoAttentionError
from attnreg.injection.discovery.blocks import input_names
from attnreg.injection.running.forward_pass import Calls
from attnreg.injection.running.padding import rooms_of
from attnreg.injection.running.passes import Passes
from attnreg.injection.running.repetition import in_backward, is_quiet

DROPOUT = nn.modules.dropout._DropoutNd
MAY_DRAW = DROPOUT, nn.RNNBase
GENERATORS = random.Random, np.random.Generator, np.random.RandomState
MARK = "_attnreg"
KEPT_IN_PARTS = "module", "_instance_forward"  # attributes that a copy of a part of the model keeps
Record = TypeVar("Record")


@dataclass(eq=False)
class Mark:
    """The mark of a module that an attached model changed."""

    # the handle; ``None`` in a copy of a part of the model, which is plain: with the handle, the whole model would be
    # copied, and the part would stay attached to it
    handle: Any
    model: nn.Module | None  # the attached model

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return Mark(*copy.deepcopy((self.handle, self.model), memo)) if id(self.model) in memo else Mark(None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mark, (None, None)  # a pickled handle fills it in


class ReplacedForward(Generic[Record]):
    """Replaces the ``forward`` of one module instance.

    Hooks would not work: any hook on a child of ``nn.TransformerEncoderLayer`` switches off its fast path, so that eval
    mode would no longer be bitwise the plain model. And no hook runs after a ``KeyboardInterrupt``, so a mode would
    stay on.

    ``records`` has a record for every call of the module in a forward pass, ``None`` for a call that runs unchanged.
    There are several if layers share the module (ALBERT).
    """

    def __init__(self, passes: Passes, module: nn.Module, records: Sequence[Record | None], name: str) -> None:
        self.passes = passes
        self.module = module
        self.records = tuple(records)
        self.name = name
        self.calls = passes.counted(len(self.records))
        self.calls_differ = len({record is None for record in records}) > 1  # so that one cannot stand for another
        self.inside: tuple[Calls, ...] = ()  # counters of the replaced forwards in this module, and of this one
        self.installed: Any = None
        self._instance_forward: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's forward."""
        return self.plain(*args, **kwargs)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Go on with a forward pass that consists of parts, or begin one, because none is running."""
        self.passes.go_on({}, self.module, (), begins=any(calls.done >= calls.number for calls in self.inside))

    def install(self, handle: object) -> None:
        """Replace the module's forward, which may already be replaced, and mark the module with the handle."""
        self._instance_forward = self.module.__dict__.get("forward")
        setattr(self.module, MARK, Mark(handle, self.passes.model))
        forward = functools.partial(_uncompiled if self.passes.uncompiled else _forward, self)
        forward.__wrapped__ = self.module.forward  # type: ignore[attr-defined]  # for inspect.signature
        self.installed = forward
        self.module.forward = forward

    def remove(self) -> None:
        """Restore the module's forward."""
        if self.module.__dict__.get("forward") is self.installed:
            if self._instance_forward is None:
                del self.module.forward
            else:
                self.module.forward = self._instance_forward
        self.installed = None  # a wrapper of the replaced forward then calls the plain forward
        self.module.__dict__.pop(MARK, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedForward[Record]:
        # In a copy of a part of the model, see `Mark`, the module runs its plain forward.
        copied = memo[id(self)] = object.__new__(type(self))
        is_part = self.installed is None or id(self.passes.model) not in memo
        names = KEPT_IN_PARTS if is_part else self.__dict__
        copied.__dict__.update({"installed": None, **copy.deepcopy({name: vars(self)[name] for name in names}, memo)})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # A pickled part is plain, too. The whole model is pickled with its handle, which restores the other attributes.
        is_model = self.installed is not None and self.module is self.passes.model
        handle = self.module.__dict__[MARK].handle if is_model else None
        return {**{name: vars(self)[name] for name in KEPT_IN_PARTS}, "handle": handle}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {"installed": None, **{name: state[name] for name in KEPT_IN_PARTS}, **self.__dict__}

    def next(self) -> Record | None:
        """Return the record of the call that begins now; raise if there are more calls than when it was attached."""
        calls, passes = self.calls, self.passes
        call, calls.done = calls.done, calls.done + 1
        if call >= calls.number:
            if not (self.module.training or passes.probing or passes.taps):
                return None  # nothing is masked: in eval mode, threads may share a model
            raise NoAttentionError(
                f"{self.name} is called more often in this forward pass than when it was attached "
                f"(calls then: {calls.number}). Attach with `example_inputs` like these inputs, and do not call the "
                "model within its own forward pass, or in several threads at once."
            )
        return self.records[call]

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that the module had before."""
        if self._instance_forward is not None:
            return self._instance_forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


# Forwards are partials of a module-level function, because closures can be neither pickled nor copied.
def _forward(replaced: ReplacedForward[Any], *args: Any, **kwargs: Any) -> Any:
    if args and args[0] is replaced.module:
        args = args[1:]  # accelerate turns the forward into a bound method
    if replaced.installed is None:
        return replaced.plain(*args, **kwargs)
    passes = replaced.passes
    if passes.seeds_own and torch.compiler.is_compiling() and rooms_of((*args, *kwargs.values())):
        return _uncompiled(replaced, *args, **kwargs)  # random numbers depend on the length of a static cache, a tensor
    passes.quiet = passes.repeats is None and is_quiet()
    if not passes.quiet:
        if passes.repeats is None and in_backward():
            passes.check_plain(replaced.name, replaced.module)
            return replaced.plain(*args, **kwargs)
        passes.checkpoints()
    if passes.latest.is_running:
        return replaced.forward(*args, **kwargs)
    try:
        replaced.enter(args, kwargs)
        output = replaced.forward(*args, **kwargs)
    except BaseException:
        passes.end()
        raise
    passes.end(completed=True)
    return output


if torch.__version__ < "2.13":  # such as 2.9, whose compiler does not notice what its graphs cannot hold
    _forward = torch.compiler.disable(_forward)

# Inductor draws other numbers in encoder-decoders whose own dropout is seeded: seen in T5, in training.
_uncompiled = torch.compiler.disable(_forward)
_uncompiled.__name__ = _uncompiled.__qualname__ = "_uncompiled"  # so that it can be pickled


class AttachedEntry(ReplacedForward[None]):
    """The attached model, or a module in it that contains several of its attention modules.

    If the module contains all of them, it is ``whole``: every call from outside is a forward pass.
    """

    def __init__(self, passes: Passes, module: nn.Module, name: str, *, whole: bool) -> None:
        super().__init__(passes, module, (None,), name)
        self._names = input_names(module)
        self._whole = whole

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass, or go on with one that consists of several parts."""
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if self._whole:
            self.passes.begin(inputs, self.module, self._names)
        else:
            self.passes.go_on(inputs, self.module, self._names, begins=any(calls.done for calls in self.inside))


class SeededModule(AttachedEntry):
    """A module whose own random numbers, such as dropout, are drawn from the seed of the pass."""

    def __init__(self, passes: Passes, module: nn.Module, name: str) -> None:
        super().__init__(passes, module, name, whole=False)
        self.digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big") << 2
        self._names_draws = not isinstance(module, DROPOUT)  # draws of a dropout are named after the module around it

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; the first module of a pass that is in training mode begins to draw."""
        draws = self.passes.own_draws
        self.calls.done += 1
        if draws is None:
            if not (self.module.training and self.passes.enabled):
                return self.plain(*args, **kwargs)
            with self.passes.drawing():
                return self.forward(*args, **kwargs)
        if not self._names_draws and draws.running:
            return self.plain(*args, **kwargs)
        # Not a method of `draws`, since torch.compile cannot follow many more nested calls.
        draws.running.append(self)
        try:
            output = self.plain(*args, **kwargs)
        finally:
            draws.running.pop()
        draws.check(self.name)
        return output


def seeded_modules(passes: Passes, names: Mapping[nn.Module, str]) -> list[SeededModule]:
    """Return the modules of a model that may draw random numbers, innermost last; raise if one holds a generator."""
    for module, name in names.items():
        leaves = ((key, leaf) for key, value in vars(module).items() for leaf in tree_leaves(value))
        if key := next((key for key, leaf in leaves if isinstance(leaf, GENERATORS)), None):
            raise InputError(
                f"{name}.{key} is or holds a generator of its own, which does not follow the seed of the pass: draw "
                'with torch, or attach without own_dropout="seeded".'
            )
    return [
        SeededModule(passes, module, name)
        for module, name in names.items()
        if type(module).forward is not nn.Module.forward
        and (isinstance(module, MAY_DRAW) or module._modules or not type(module).__module__.startswith("torch.nn."))
    ]


def entries(model: nn.Module, around: Sequence[Sequence[nn.Module]]) -> list[nn.Module]:
    """Return the model and the modules in it that contain all chosen attention, outermost first.

    ``around`` has a list for every attention: the modules that contain it, outermost first, and its module at the end.
    """
    shared = itertools.takewhile(lambda modules: len({*modules}) == 1, zip(*around, strict=False))
    return [model, *(modules[0] for modules in shared if modules[0] is not model)]


def parts_of(whole: Sequence[nn.Module], around: Sequence[Sequence[nn.Module]]) -> list[nn.Module]:
    """Return the other modules that contain several attention modules, such as one of two encoders, outermost first."""
    attention_in: dict[nn.Module, set[nn.Module]] = {}
    for modules in around:
        for module in modules[:-1]:
            attention_in.setdefault(module, set()).add(modules[-1])
    return [module for module, attention in attention_in.items() if len(attention) > 1 and module not in whole]


def connect(forwards: Sequence[ReplacedForward[Any]]) -> None:
    """Give every replaced forward the counters of all replaced forwards in its module."""
    calls_of: dict[nn.Module, list[Calls]] = {}
    for replaced in forwards:
        calls_of.setdefault(replaced.module, []).append(replaced.calls)
    for replaced in forwards:
        replaced.inside = tuple(calls for module in replaced.module.modules() for calls in calls_of.get(module, ()))
