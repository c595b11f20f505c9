"""Recognize gradient checkpointing, and return to the state in which a checkpoint began when it runs again."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor

from attnreg.injection.backends import Tap
from attnreg.injection.running.forward_pass import Calls, Pass
from attnreg.injection.running.rates import DropRates

#: returns the innermost hooks on saved tensors, by which checkpoints that are not reentrant repeat
TOP_HOOKS: Any = torch._C._autograd._top_saved_tensors_default_hooks


def is_quiet() -> bool:
    """Whether nothing can repeat or record what is computed now: no checkpoint, backward pass, compiler, transform."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and TOP_HOOKS(True) is None
    )


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

    It lives as long as the checkpoint may be repeated. Compiled code needs none: torch repeats what it has compiled.
    """
    if torch.compiler.is_compiling():
        return []
    hooks: Any = torch._C._autograd
    found: list[tuple[Any, str]] = []
    stack: list[Any] = []
    while (top := TOP_HOOKS(True)) is not None:
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


@dataclass(eq=False)
class Checkpoint:
    """What a gradient checkpoint needs to repeat a part of a forward pass as that was."""

    state: State  # in which it began
    calls: list[int]  # of each module, until it began
    settings: tuple[Any, ...]  # what masks depend on besides the seed
    is_reentrant: bool  # whether gradients are enabled only when it is repeated
    begun: list[Pass] = field(default_factory=list)  # the passes that began in it
    is_repeated: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether it is of a masked pass."""
        around = self.state.latest
        return ((around.is_running or around.is_open) and around.acts) or any(each.acts for each in self.begun)


class Repetition(NamedTuple):
    """How far a checkpoint has been repeated."""

    checkpoint: Checkpoint
    begun: Iterator[Pass]


@dataclass(eq=False)
class State:
    """What holds for what runs now. A checkpoint returns to it; a copy of the model begins anew."""

    latest: Pass = field(default_factory=Pass)
    mode: Any = None  # the mode of the innermost attention module that is running
    own: Any = None  # an `OwnDraws`, which draws the model's own randomness, while it runs
    enabled: bool = True
    probing: bool = False
    taps: Mapping[str, Tap] = field(default_factory=dict)
    rows: Tensor | None = None  # index of each sample in a larger batch
    given: Tensor | None = None  # seed of all passes, if they repeat one
    repeats: Repetition | None = None  # what gradient checkpointing repeats
    quiet: bool = False  # whether nothing can repeat or record the call of a module that began latest

    def now(self) -> State:
        """Return the state as it is now, which does not change."""
        state = State(**{each.name: getattr(self, each.name) for each in fields(State)})
        state.latest = self.latest.again()
        state.own = None if self.own is None else self.own.again(state.latest)
        return state


class Repeatable(State):
    """A state to which gradient checkpointing returns when it repeats a part of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = DropRates()
        self._calls: list[Calls] = []
        self._checkpoints: WeakKeyDictionary[Any, Checkpoint] = WeakKeyDictionary()

    def settings(self) -> tuple[Any, ...]:
        """Return what masks depend on besides the seed."""
        raise NotImplementedError

    @contextmanager
    def having(self, **settings: Any) -> Iterator[None]:
        """Set attributes within the block, in which no pass from outside goes on."""
        before = {name: getattr(self, name) for name in settings}
        vars(self).update(settings)
        self.latest.is_open, self.latest.active = False, None
        try:
            yield
        finally:
            vars(self).update(before)
            self.latest.is_open, self.latest.active = False, None

    def counted(self, number: int) -> Calls:
        """Return a counter of a module's calls, which begins anew with each pass."""
        self._calls.append(Calls(number))
        return self._calls[-1]

    def checkpoints(self) -> list[Checkpoint]:
        """Return the gradient checkpoints that run now; each will repeat what follows from the present state."""
        found = []
        for holder, attribute in checkpoints_around():
            checkpoint = self._checkpoints.get(holder)
            if checkpoint is None:
                calls = [each.done for each in self._calls]
                is_reentrant = attribute == "run_function" or self._repeats_a_reentrant_one()
                checkpoint = Checkpoint(self.now(), calls, self.settings(), is_reentrant)
                self._checkpoints[holder] = checkpoint
                setattr(holder, attribute, functools.partial(self._repeat, checkpoint, getattr(holder, attribute)))
            found.append(checkpoint)
        return found

    def has_grad(self) -> bool:
        """Whether gradients are enabled, or were when this was computed first."""
        return torch.is_grad_enabled() and not self._repeats_a_reentrant_one()

    def _repeats_a_reentrant_one(self) -> bool:
        return self.repeats is not None and self.repeats.checkpoint.is_reentrant

    def _repeat(self, checkpoint: Checkpoint, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the function of a checkpoint again, in the state in which it began."""
        checkpoint.is_repeated = True
        if checkpoint.is_masked and checkpoint.settings != self.settings():
            raise RuntimeError(
                "Gradient checkpointing cannot repeat the masks of the regularizer, because its settings, epoch or "
                "step, or the training mode, have changed since the forward pass. Run the backward pass before "
                "`eval()`, `on_epoch()`, `handle.step()` and new rates."
            )
        state = checkpoint.state.now()
        state.repeats = Repetition(checkpoint, iter([*checkpoint.begun]))
        before = {name: getattr(self, name) for name in (*vars(state), "rates")}, [each.done for each in self._calls]
        self._return_to({**vars(state), "rates": DropRates()}, checkpoint.calls)
        try:
            with nullcontext() if state.own is None else state.own.active():
                return run(*args, **kwargs)
        finally:
            self._return_to(*before)

    def _return_to(self, settings: Mapping[str, Any], calls: Sequence[int]) -> None:
        vars(self).update(settings)
        for each, done in zip(self._calls, calls, strict=True):
            each.done = done

    def waits(self) -> bool:
        """Whether any checkpoint that was masked waits for its backward pass."""
        return any(each.is_masked and not each.is_repeated for each in self._checkpoints.values())

    def __getstate__(self) -> dict[str, Any]:
        # A copy made within a `with` block or a pass would never leave it.
        return {**vars(self), **vars(State()), "_checkpoints": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._checkpoints = WeakKeyDictionary()
