"""Running a model so that it is afterwards as it was before, whatever its forward pass does to itself."""

from __future__ import annotations

import random
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnreg.injection.undisturbed import undisturbed

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
FOREIGN: tuple[type, ...] = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
FOREIGN += (weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType)
EMPTY: dict[Any, Any] = {}
LIBRARIES = ("accelerate", "peft", "torch", "transformers")
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
    remembered = _remembered(model, tensors)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with undisturbed(model), _without_hooks(model), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they will be heard in the first real forward pass
            yield tensors
    finally:
        for held, before in remembered:
            _restore(held, before)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    everywhere = torch.nn.modules.module
    # Most have none, and need nothing.
    kept = [(vars(module), name) for module in model.modules() for name in HOOKS if vars(module)[name]]
    kept += [(vars(everywhere), f"_global{name}") for name in HOOKS]
    before = [holder[name] for holder, name in kept]
    for holder, name in kept:
        holder[name] = OrderedDict((key, hook) for key, hook in holder[name].items() if _is_machinery(hook))
    try:
        yield
    finally:
        for (holder, name), hooks in zip(kept, before, strict=True):
            holder[name] = hooks


def _is_machinery(hook: Any) -> bool:
    """Whether a hook belongs to a library that the model is made with, and its forward pass needs it."""
    hook = getattr(hook, "func", hook)  # of a partial
    return str(getattr(hook, "__module__", "")).partition(".")[0] in LIBRARIES


def _remembered(model: nn.Module, tensors: list[Tensor]) -> list[tuple[Any, Any]]:
    """Everything that the model holds and that can change, with a copy of what is in it."""
    seen: set[int] = set()
    copies: list[tuple[Any, Any]] = []
    waiting: list[Any] = [vars(module) for module in model.modules()]
    for held in waiting:  # grows while it is read
        if type(held) in ATOMS or id(held) in seen or len(seen) > MOST:
            continue
        seen.add(id(held))
        if isinstance(held, dict):
            copies.append((held, held.copy() if held else EMPTY))
            waiting += held.values()
        elif isinstance(held, Tensor):
            tensors.append(held)
        elif isinstance(held, (list, deque, set)):
            copies.append((held, held.copy()))
            waiting += held
        elif isinstance(held, np.ndarray):
            copies.append((held, held.copy()))
        elif isinstance(held, (tuple, frozenset)):
            waiting += held
        elif not isinstance(held, FOREIGN) and hasattr(held, "__dict__"):
            waiting.append(vars(held))
    return copies


def _restore(held: Any, before: Any) -> None:
    if isinstance(held, np.ndarray):
        if held.flags.writeable:
            np.copyto(held, before)
    elif isinstance(held, dict):
        same = [*map(id, held.values())] == [*map(id, before.values())]
        if held is not before and not (same and held.keys() == before.keys()):
            held.clear()
            held.update(before)
    elif isinstance(held, set):
        if held != before:
            held.clear()
            held.update(before)
    elif [*map(id, held)] != [*map(id, before)]:
        held.clear()
        held.extend(before)
