"""Running a model so that it is afterwards as it was before, whatever its forward pass does to itself."""

from __future__ import annotations

import random
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnreg.injection.undisturbed import undisturbed

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
ATOMS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
ATOMS += (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
ATOMS += (weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType)
MOST = 20_000  # objects that are looked at; what else a model holds on to is not its own


@contextmanager
def unchanged(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block the model is in eval mode, without gradients and without its hooks.

    Afterwards every attribute of every module is as before: names, plain values, containers and what they hold,
    objects such as its config. The random states of Python, numpy and torch come back.

    Yields:
        the tensors that the model holds besides its parameters and buffers.
    """
    tensors: list[Tensor] = []
    undo = list(_remembered(model, tensors))
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with undisturbed(model), _without_hooks(model), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they will be heard in the first real forward pass
            yield tensors
    finally:
        for restore in undo:
            restore()
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    everywhere = torch.nn.modules.module
    kept = [(vars(module), name) for module in model.modules() for name in HOOKS]
    kept += [(vars(everywhere), f"_global{name}") for name in HOOKS]
    before = [holder[name] for holder, name in kept]
    for holder, name in kept:
        holder[name] = OrderedDict()
    try:
        yield
    finally:
        for (holder, name), hooks in zip(kept, before, strict=True):
            holder[name] = hooks


def _remembered(model: nn.Module, tensors: list[Tensor]) -> Iterator[Callable[[], None]]:
    seen: set[int] = set()
    waiting: list[Any] = [vars(module) for module in model.modules()]
    for held in waiting:  # grows while it is read
        if isinstance(held, ATOMS) or id(held) in seen or len(seen) > MOST:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            tensors.append(held)
        elif isinstance(held, np.ndarray):
            yield _array(held, held.copy())
        elif isinstance(held, dict):
            yield _mapping(held, dict(held))
            waiting += held.values()
        elif isinstance(held, (list, deque)):
            yield _sequence(held, list(held))
            waiting += held
        elif isinstance(held, set):
            yield _set(held, set(held))
        elif isinstance(held, (tuple, frozenset)):
            waiting += held
        elif hasattr(held, "__dict__"):
            waiting.append(vars(held))


def _mapping(held: dict[Any, Any], before: dict[Any, Any]) -> Callable[[], None]:
    def restore() -> None:
        if len(held) != len(before) or any(held.get(key, before) is not value for key, value in before.items()):
            held.clear()
            held.update(before)

    return restore


def _sequence(held: list[Any] | deque[Any], before: list[Any]) -> Callable[[], None]:
    def restore() -> None:
        if len(held) != len(before) or any(a is not b for a, b in zip(held, before, strict=True)):
            held.clear()
            held.extend(before)

    return restore


def _set(held: set[Any], before: set[Any]) -> Callable[[], None]:
    def restore() -> None:
        if held != before:
            held.clear()
            held.update(before)

    return restore


def _array(held: np.ndarray, before: np.ndarray) -> Callable[[], None]:
    def restore() -> None:
        if held.flags.writeable:
            np.copyto(held, before)

    return restore
