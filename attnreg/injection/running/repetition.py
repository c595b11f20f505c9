"""Recognize gradient checkpointing, which computes parts of a forward pass a second time in the backward pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint


def in_backward() -> bool:
    """Whether gradient checkpointing recomputes a forward pass now, in a backward pass.

    A forward pass in a hook of a backward pass is another, new one.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    return any(
        code in _OWN_BACKWARDS or (code.co_name == "unpack_hook" and code.co_filename == _CHECKPOINTS)
        for code in (frame.f_code for frame in _frames())
    )


def in_hook() -> bool:
    """Whether a backward pass is running, and what runs in it repeats nothing."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1 and not in_backward()


def checkpoints_around() -> list[tuple[Any, str]]:
    """Return what stands for each checkpoint that runs now, and its attribute that holds the function to run again.

    It lives as long as the checkpoint may be repeated.
    """
    hooks: Any = torch._C._autograd
    found: list[tuple[Any, str]] = []
    stack: list[Any] = []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        stack.append(top)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(stack):
        hooks._push_saved_tensors_default_hooks(pack, unpack)
        if pack.__module__ == torch.utils.checkpoint.__name__ and "frame" in pack.__code__.co_freevars:
            held = dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))
            found.append((held["frame"].cell_contents, "recompute_fn"))
    reentrant = () if torch.is_grad_enabled() else (each for each in _frames() if each.f_code is _REENTRANT)
    return found + [(frame.f_locals["ctx"], "run_function") for frame in reentrant]


def checkpoint_around() -> Any:
    """Return what stands for the innermost checkpoint that runs now; ``None`` outside of all."""
    # Without gradients, only reentrant ones repeat what is computed.
    kind = "recompute_fn" if torch.is_grad_enabled() else "run_function"
    return next((holder for holder, attribute in reversed(checkpoints_around()) if attribute == kind), None)


def foreign_function(stop: CodeType | None = None) -> str | None:
    """Return the name of an ``autograd.Function``, other than torch's checkpoint, whose forward runs now in ``stop``.

    Its own backward pass may compute anything.
    """
    if torch.is_grad_enabled():
        return None
    # Each is found by its code: in newer releases of torch, `apply` has no frame of its own.
    forwards = {
        getattr(inspect.unwrap(each.forward), "__code__", None) for each in _subclasses(torch.autograd.Function)
    }
    codes = (frame.f_code for frame in _frames(stop))
    found = next((code for code in codes if code in forwards and code is not _REENTRANT), None)
    return None if found is None else getattr(found, "co_qualname", found.co_name)  # since Python 3.11


def _frames(stop: CodeType | None = None) -> Iterator[FrameType]:
    """Yield the frames that run now, innermost first, within ``stop`` and within a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not stop and frame.f_code is not _BACKWARD:
        yield frame
        frame = frame.f_back


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


_CHECKPOINTS = torch.utils.checkpoint.__file__
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_OWN_BACKWARDS = {
    value.__code__
    for name, value in vars(torch.autograd.function.BackwardCFunction).items()
    if name in ("apply", "apply_boxed")  # the latter in newer releases of torch
}
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__
