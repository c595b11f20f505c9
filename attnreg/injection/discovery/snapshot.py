"""Run a model, and then undo what its forward pass changed."""

from __future__ import annotations

import random
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnreg.errors import NoAttentionError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
FOREIGN: tuple[type, ...] = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
FOREIGN += (weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType)
EMPTY: dict[Any, Any] = {}
LIBRARIES = ("accelerate", "peft", "torch", "transformers")
MOST = 20_000  # objects to inspect at most; a model that reaches more refers to something outside it


@contextmanager
def evaluated(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Set a model to eval (or ``training``) mode within the block; restore each module's mode after it.

    In ``training`` mode, parts of a training model that are in eval mode, such as frozen statistics, stay in it. The
    method ``train`` is not called: some layers change their weights in it.
    """
    modes = [(module, module.training) for module in model.modules()]
    for module, mode in modes:
        module.training = training and (mode or not modes[0][1])
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def undisturbed(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Set a model to eval, or ``training``, mode within the block; then restore modes, statistics, random states."""
    statistics = put_back(model.buffers() if training else ())
    with evaluated(model, training=training), statistics, draws_repeated(model):
        yield


@contextmanager
def draws_repeated(model: nn.Module) -> Iterator[None]:
    """Let what follows the block draw what the block draws, from the global generators of torch, Python and numpy."""
    used = {each.device for each in model.parameters()}  # the CPU's generator is always among them; meta has none
    devices = [each for each in used if each.type != "cpu" and hasattr(torch, each.type)]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors the bits back, after the block, that they have now."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[list[Tensor]]:
    """Set a model to eval mode, without gradients and hooks, within the block; then as :func:`restored`."""
    quiet = warnings.catch_warnings()
    with restored(model) as tensors, undisturbed(model), _without_hooks(model), torch.no_grad(), quiet:
        warnings.simplefilter("ignore")  # the first real forward pass repeats them
        yield tensors


@contextmanager
def restored(model: nn.Module) -> Iterator[list[Tensor]]:
    """Restore every attribute of every module after the block.

    Yields the tensors that the model holds, other than parameters and buffers.
    """
    tensors: list[Tensor] = []
    remembered = _remembered(model, tensors)
    try:
        yield tensors
    finally:
        for held, before in remembered:
            _restore(held, before)


@contextmanager
def materialized(model: nn.Module) -> Iterator[None]:
    """Hold zeros on the CPU in place of parameters and buffers on the meta device, within the block.

    Zeros that nobody writes to take no memory. Attention is found by what depends on what, not by values; only those of
    masks are needed.
    """
    zeros: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for name, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                is_square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] > 1
                may_mask = tensor.dtype == torch.bool or (is_square and tensor.is_floating_point())
                if held is module._buffers and may_mask:
                    path = f"{name}.{key}".lstrip(".")
                    raise NoAttentionError(
                        f"The buffer {path} is on the meta device, and may be a mask whose values attnreg needs. "
                        "Materialize the model (`to_empty`, then load its weights), then attach."
                    )
                before.append((held, key, tensor))
                if id(tensor) not in zeros:
                    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
                    zeros[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if held is module._parameters else made
    try:
        for held, key, tensor in before:
            held[key] = zeros[id(tensor)]
        yield
    finally:
        for held, key, tensor in before:
            held[key] = tensor


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    everywhere = torch.nn.modules.module
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
    """Whether a hook belongs to a library that the forward pass depends on."""
    hook = getattr(hook, "func", hook)  # if it is a partial
    return str(getattr(hook, "__module__", "")).partition(".")[0] in LIBRARIES


def _remembered(model: nn.Module, tensors: list[Tensor]) -> list[tuple[Any, Any]]:
    """Return everything mutable that the model holds, each with a copy of its contents."""
    seen: set[int] = set()
    copies: list[tuple[Any, Any]] = []
    waiting: list[Any] = [vars(module) for module in model.modules()]
    for held in waiting:  # grows during the loop
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
        elif isinstance(held, (tuple, frozenset)):
            waiting += held
        elif not isinstance(held, FOREIGN) and hasattr(held, "__dict__"):
            waiting.append(vars(held))
    return copies


def _restore(held: Any, before: Any) -> None:
    if held is not before and _contents(held) != _contents(before):
        held.clear()
        (held.extend if isinstance(held, (list, deque)) else held.update)(before)


def _contents(held: Any) -> Any:
    if isinstance(held, dict):
        return [(key, id(value)) for key, value in held.items()]
    return held if isinstance(held, set) else [*map(id, held)]
