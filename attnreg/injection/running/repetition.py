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

    A forward pass in a hook of a backward pass does not repeat one.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    return any(
        code in _FUNCTION_BACKWARDS or (code.co_name == "unpack_hook" and code.co_filename == _CHECKPOINTS)
        for code in (frame.f_code for frame in _frames())
    )


def in_hook() -> bool:
    """Whether a backward pass is running, and the code that runs in it repeats no forward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1 and not in_backward()


def checkpoints_around() -> list[tuple[Any, str]]:
    """Return an object for every checkpoint that runs now, and its attribute that holds the function to run again.

    The object lives as long as the checkpoint may be repeated. Compiled code needs none: torch repeats its own graphs.
    """
    if torch.compiler.is_compiling():
        return []
    hooks: Any = torch._C._autograd
    checkpoints: list[tuple[Any, str]] = []
    stack: list[Any] = []
    while (hooks_on_top := TOP_HOOKS(True)) is not None:
        stack.append(hooks_on_top)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(stack):
        hooks._push_saved_tensors_default_hooks(pack, unpack)
        if pack.__module__ == torch.utils.checkpoint.__name__ and "frame" in pack.__code__.co_freevars:
            variables = dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))
            checkpoints.append((variables["frame"].cell_contents, "recompute_fn"))
    reentrant = () if torch.is_grad_enabled() else (frame for frame in _frames() if frame.f_code is _REENTRANT)
    return checkpoints + [(frame.f_locals["ctx"], "run_function") for frame in reentrant]


def checkpoint_around() -> Any:
    """Return the object of the innermost checkpoint that runs now; ``None`` outside of all."""
    # Without gradients, only reentrant checkpoints repeat a computation.
    kind = "recompute_fn" if torch.is_grad_enabled() else "run_function"
    return next((holder for holder, attribute in reversed(checkpoints_around()) if attribute == kind), None)


def foreign_function(stop: CodeType | None = None) -> str | None:
    """Return the name of an ``autograd.Function``, other than torch's checkpoint, whose forward runs now in ``stop``.

    Its backward pass may compute anything.
    """
    if torch.is_grad_enabled():
        return None
    # Functions are recognized by the code of `forward`: in newer releases of torch, `apply` has no frame.
    functions = _subclasses(torch.autograd.Function)
    forwards = {getattr(inspect.unwrap(function.forward), "__code__", None) for function in functions}
    codes = (frame.f_code for frame in _frames(stop))
    running = next((code for code in codes if code in forwards and code is not _REENTRANT), None)
    return None if running is None else getattr(running, "co_qualname", running.co_name)  # since Python 3.11


def _frames(stop: CodeType | None = None) -> Iterator[FrameType]:
    """Yield the frames that run now, innermost first, within ``stop`` and within a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not stop and frame.f_code is not _BACKWARD:
        yield frame
        frame = frame.f_back


def _subclasses(kind: Any) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


_CHECKPOINTS = torch.utils.checkpoint.__file__
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_FUNCTION_BACKWARDS = {
    value.__code__
    for name, value in vars(torch.autograd.function.BackwardCFunction).items()
    if name in ("apply", "apply_boxed")  # the latter in newer releases of torch
}
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__


@dataclass(eq=False)
class Checkpoint:
    """What a gradient checkpoint needs to repeat a part of a forward pass with the same masks."""

    state: State  # in which it began
    calls: list[int]  # number of calls of every module before it began
    settings: tuple[Any, ...]  # the values that masks depend on besides the seed
    is_reentrant: bool  # whether gradients are enabled only when it is repeated
    begun: list[Pass] = field(default_factory=list)  # the passes that began in it
    is_repeated: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether it belongs to a masked pass."""
        latest = self.state.latest
        return ((latest.is_running or latest.is_open) and latest.acts) or any(begun.acts for begun in self.begun)


class Repetition(NamedTuple):
    """How far a checkpoint has been repeated."""

    checkpoint: Checkpoint
    begun: Iterator[Pass]


@dataclass(eq=False)
class State:
    """The present state of an attached model. A checkpoint returns to it; a copy of the model begins anew."""

    latest: Pass = field(default_factory=Pass)
    mode: Any = None  # the mode of the innermost attention module that is running
    own_draws: Any = None  # an `OwnDraws`, while it draws the model's own randomness
    enabled: bool = True
    probing: bool = False
    taps: Mapping[str, Tap] = field(default_factory=dict)
    rows: Tensor | None = None  # index of each sample in a larger batch
    replayed_seed: Tensor | None = None  # seed of all passes, if they repeat an earlier pass
    repeats: Repetition | None = None  # the checkpoint that is repeated now
    quiet: bool = False  # whether nothing can repeat or record the latest call of a module

    def now(self) -> State:
        """Return a copy of the state, which does not change afterwards."""
        state = State(**{attribute.name: getattr(self, attribute.name) for attribute in fields(State)})
        state.latest = self.latest.again()
        state.own_draws = None if self.own_draws is None else self.own_draws.again(state.latest)
        return state


class Repeatable(State):
    """A state to which gradient checkpointing returns when it repeats a part of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = DropRates()
        self._calls: list[Calls] = []
        self._checkpoints: WeakKeyDictionary[Any, Checkpoint] = WeakKeyDictionary()

    def settings(self) -> tuple[Any, ...]:
        """Return the values that masks depend on besides the seed."""
        raise NotImplementedError

    @contextmanager
    def having(self, **settings: Any) -> Iterator[None]:
        """Set attributes within the block; a pass that began outside does not go on in it."""
        previous = {name: getattr(self, name) for name in settings}
        vars(self).update(settings)
        self.latest.is_open, self.latest.active = False, None
        try:
            yield
        finally:
            vars(self).update(previous)
            self.latest.is_open, self.latest.active = False, None

    def counted(self, number: int) -> Calls:
        """Return a counter of a module's calls, which begins anew with every pass."""
        self._calls.append(Calls(number))
        return self._calls[-1]

    def checkpoints(self) -> list[Checkpoint]:
        """Return the gradient checkpoints that run now, and note the present state, from which they will repeat."""
        checkpoints = []
        for holder, attribute in checkpoints_around():
            checkpoint = self._checkpoints.get(holder)
            if checkpoint is None:
                done = [calls.done for calls in self._calls]
                is_reentrant = attribute == "run_function" or self._repeats_reentrant()
                checkpoint = Checkpoint(self.now(), done, self.settings(), is_reentrant)
                self._checkpoints[holder] = checkpoint
                setattr(holder, attribute, functools.partial(self._repeat, checkpoint, getattr(holder, attribute)))
            checkpoints.append(checkpoint)
        return checkpoints

    def has_grad(self) -> bool:
        """Whether gradients are enabled, or were in the pass that is repeated now."""
        return torch.is_grad_enabled() and not self._repeats_reentrant()

    def _repeats_reentrant(self) -> bool:
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
        attributes = {name: getattr(self, name) for name in (*vars(state), "rates")}
        done = [calls.done for calls in self._calls]
        self._return_to({**vars(state), "rates": DropRates()}, checkpoint.calls)
        try:
            with nullcontext() if state.own_draws is None else state.own_draws.active():
                return run(*args, **kwargs)
        finally:
            self._return_to(attributes, done)

    def _return_to(self, attributes: Mapping[str, Any], numbers_done: Sequence[int]) -> None:
        vars(self).update(attributes)
        for calls, done in zip(self._calls, numbers_done, strict=True):
            calls.done = done

    def waits(self) -> bool:
        """Whether any checkpoint that was masked waits for its backward pass."""
        return any(checkpoint.is_masked and not checkpoint.is_repeated for checkpoint in self._checkpoints.values())

    def __getstate__(self) -> dict[str, Any]:
        # Otherwise, a copy from within a `with` block or a pass would never leave it.
        return {**vars(self), **vars(State()), "_checkpoints": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._checkpoints = WeakKeyDictionary()
