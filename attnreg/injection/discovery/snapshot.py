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
MAX_OBJECTS = 20_000  # to inspect; a model that reaches more refers to something outside it


@contextmanager
def evaluated(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Set a model to eval (or ``training``) mode within the block; restore the modes of its modules after it.

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
    """Let code after the block repeat its draws from the global generators of torch, Python and numpy."""
    used = {parameter.device for parameter in model.parameters()}  # the CPU's generator counts anyway; meta has none
    devices = [device for device in used if device.type != "cpu" and hasattr(torch, device.type)]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors, bit by bit, after the block."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[list[Tensor]]:
    """Set a model to eval mode, without gradients and hooks, within the block; then restore it (:func:`restored`)."""
    quiet = warnings.catch_warnings()
    with restored(model) as tensors, undisturbed(model), _without_hooks(model), torch.no_grad(), quiet:
        warnings.simplefilter("ignore")  # the first real forward pass repeats them
        yield tensors


@contextmanager
def restored(model: nn.Module) -> Iterator[list[Tensor]]:
    """Restore every attribute of every module after the block.

    Yields the tensors that the model holds besides its parameters and buffers.
    """
    tensors: list[Tensor] = []
    copies = _copies(model, tensors)
    try:
        yield tensors
    finally:
        for container, copy in copies:
            _restore(container, copy)


@contextmanager
def materialized(model: nn.Module) -> Iterator[None]:
    """Hold zeros on the CPU in place of parameters and buffers on the meta device, within the block.

    Zeros that nobody writes to take no memory. Discovery needs the values of masks only.
    """
    zeros: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for name, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                is_square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] > 1
                may_mask = tensor.dtype == torch.bool or (is_square and tensor.is_floating_point())
                if tensors is module._buffers and may_mask:
                    path = f"{name}.{key}".lstrip(".")
                    raise NoAttentionError(
                        f"The buffer {path} is on the meta device, and may be a mask whose values attnreg needs. "
                        "Materialize the model (`to_empty`, then load its weights), then attach."
                    )
                replaced.append((tensors, key, tensor))
                if id(tensor) not in zeros:
                    zero = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = tensors is module._parameters
                    zeros[id(tensor)] = nn.Parameter(zero, tensor.requires_grad) if is_parameter else zero
    try:
        for tensors, key, tensor in replaced:
            tensors[key] = zeros[id(tensor)]
        yield
    finally:
        for tensors, key, tensor in replaced:
            tensors[key] = tensor


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    holders = [(vars(module), name) for module in model.modules() for name in HOOKS if vars(module)[name]]
    holders += [(vars(torch.nn.modules.module), f"_global{name}") for name in HOOKS]
    removed = [holder[name] for holder, name in holders]
    for holder, name in holders:
        holder[name] = OrderedDict((key, hook) for key, hook in holder[name].items() if _is_machinery(hook))
    try:
        yield
    finally:
        for (holder, name), hooks in zip(holders, removed, strict=True):
            holder[name] = hooks


def _is_machinery(hook: Any) -> bool:
    """Whether a hook belongs to a library that the forward pass depends on."""
    hook = getattr(hook, "func", hook)  # if it is a partial
    return str(getattr(hook, "__module__", "")).partition(".")[0] in LIBRARIES


def _copies(model: nn.Module, tensors: list[Tensor]) -> list[tuple[Any, Any]]:
    """Return the mutable containers that the model holds, with copies of their contents; append its tensors."""
    seen: set[int] = set()
    copies: list[tuple[Any, Any]] = []
    waiting: list[Any] = [vars(module) for module in model.modules()]
    for value in waiting:  # grows during the loop
        if type(value) in ATOMS or id(value) in seen or len(seen) > MAX_OBJECTS:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            copies.append((value, value.copy() if value else EMPTY))
            waiting += value.values()
        elif isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, deque, set)):
            copies.append((value, value.copy()))
            waiting += value
        elif isinstance(value, (tuple, frozenset)):
            waiting += value
        elif not isinstance(value, FOREIGN) and hasattr(value, "__dict__"):
            waiting.append(vars(value))
    return copies


def _restore(container: Any, copy: Any) -> None:
    if container is not copy and _contents(container) != _contents(copy):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(copy)


def _contents(container: Any) -> Any:
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return container if isinstance(container, set) else [*map(id, container)]
