"""Recognize what a backward pass repeats: gradient checkpointing computes parts of a forward pass a second time."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn

from attnreg.regularizer.base import Regularizer

REMEMBERED = 64  # computations of a place
What = TypeVar("What")


def in_backward() -> bool:
    """Whether gradient checkpointing recomputes a forward pass now, in a backward pass.

    A forward pass in a hook of a backward pass is another, new one.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _BACKWARD:
        code = frame.f_code
        if code in _OWN_BACKWARDS or (code.co_name == "unpack_hook" and code.co_filename == _CHECKPOINTS):
            return True
        frame = frame.f_back
    return False


def in_hook() -> bool:
    """Whether a backward pass is running, and what runs in it repeats nothing."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1 and not in_backward()


class Again(functools.partial[Any]):
    """How a checkpoint runs its function again."""


@dataclass(frozen=True)
class RunningCheckpoint:
    """A checkpoint that runs now, and keeps a function that its backward pass runs again."""

    holder: Any
    attribute: str

    @property
    def is_wrapped(self) -> bool:
        """Whether its function was wrapped."""
        return isinstance(getattr(self.holder, self.attribute), Again)

    def wrap(self, again: Callable[..., Any]) -> None:
        """Let ``again`` run the function, given it and its arguments."""
        setattr(self.holder, self.attribute, Again(again, getattr(self.holder, self.attribute)))


def checkpoints_around() -> list[RunningCheckpoint]:
    """Return all checkpoints that run now."""
    hooks: Any = torch._C._autograd
    found: list[RunningCheckpoint] = []
    stack: list[Any] = []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        stack.append(top)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(stack):
        hooks._push_saved_tensors_default_hooks(pack, unpack)
        if pack.__module__ == torch.utils.checkpoint.__name__ and "frame" in pack.__code__.co_freevars:
            held = dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))
            found.append(RunningCheckpoint(held["frame"].cell_contents, "recompute_fn"))
    frame: FrameType | None = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None and frame.f_code is not _BACKWARD:
        if frame.f_code is _REENTRANT:
            found.append(RunningCheckpoint(frame.f_locals["ctx"], "run_function"))
        frame = frame.f_back
    return found


def checkpoint_around() -> Any:
    """Return what stands for the innermost checkpoint that runs now; ``None`` outside of all."""
    # Without gradients, only reentrant ones repeat what is computed.
    kind = "recompute_fn" if torch.is_grad_enabled() else "run_function"
    return next((each.holder for each in reversed(checkpoints_around()) if each.attribute == kind), None)


def in_checkpoint() -> bool:
    """Whether a checkpoint may run what is computed now in a pass with gradients, so that it may be repeated."""
    return not torch.is_grad_enabled() or checkpoint_around() is not None


def functions_around(stop: CodeType | None = None) -> Iterator[CodeType]:
    """Yield the code of each ``autograd.Function`` whose forward runs now within ``stop``, innermost first."""
    # Each is found by its code: in newer releases of torch, `apply` has no frame of its own.
    forwards = {_code_of_forward(each) for each in _subclasses(torch.autograd.Function)}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not stop and frame.f_code is not _BACKWARD:
        if frame.f_code in forwards:
            yield frame.f_code
        frame = frame.f_back


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _code_of_forward(function: Any) -> CodeType | None:
    return getattr(inspect.unwrap(function.forward), "__code__", None)


_CHECKPOINTS = torch.utils.checkpoint.__file__
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_OWN_BACKWARDS = {
    value.__code__
    for name, value in vars(torch.autograd.function.BackwardCFunction).items()
    if name in ("apply", "apply_boxed")  # the latter in newer releases of torch
}
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__


def mark() -> int:
    """Return a number that stands for the state of torch's generator."""
    return hash(torch.get_rng_state().numpy().tobytes())


@dataclass(eq=False)
class Computation(Generic[What]):
    """One computation of a place, in a forward pass with gradients."""

    mark: int  # of the state of torch's generator, by which this computation is known again
    what: What
    repeated: bool = False


class Computations(Generic[What]):
    """The computations of each place in earlier forward passes.

    Gradient checkpointing repeats a part of a forward pass during the backward pass, and tells nobody which part. So
    the state of torch's generator marks each computation. If checkpointing sets the generator back, as it does by
    default, the same mark comes again and names the computation. Otherwise (``preserve_rng_state=False``), it must be
    the only one at its place that has not been repeated since the latest optimizer step.
    """

    def __init__(self) -> None:
        self._done: dict[Hashable, deque[Computation[What]]] = {}

    def note(self, place: Hashable, here: int, what: What) -> None:
        """Note a computation of a place, and the :func:`mark` at its beginning."""
        self._done.setdefault(place, deque(maxlen=REMEMBERED)).append(Computation(here, what))

    def waits(self, is_alive: Callable[[What], bool]) -> bool:
        """Whether any computation of which this is true has not been repeated."""
        return any(not each.repeated and is_alive(each.what) for done in self._done.values() for each in done)

    def lost(self, is_alive: Callable[[What], bool]) -> bool:
        """Whether any computation of which this is true was forgotten before it was repeated."""
        return any(not each.repeated and is_alive(each.what) for each in self._done.get(None, ()))

    def knows(self, place: Hashable) -> bool:
        """Whether a place was computed since the latest step."""
        return bool(self._done.get(place))

    def candidates(self, place: Hashable) -> tuple[list[Computation[What]], bool]:
        """Return the computations that may be the one that is repeated now, and whether the mark names them."""
        done, here = list(self._done.get(place, ())), mark()
        marked = [each for each in done if each.mark == here]
        return marked or done, bool(marked)

    def forget(self, is_alive: Callable[[What], bool] = lambda _: False) -> None:
        """Forget all computations, because the step is done, except in :meth:`waits` those of which this is true."""
        left = (each for done in self._done.values() for each in done if not each.repeated and is_alive(each.what))
        self._done = {None: deque(left, maxlen=REMEMBERED)}  # at no place

    def __getstate__(self) -> dict[str, Any]:
        return {"_done": {}}


def waiting(found: list[Computation[What]]) -> list[Computation[What]]:
    """Return the computations that have not been repeated; all if all have, for a second backward pass."""
    return [each for each in found if not each.repeated] or found


class Calls:
    """Counts the calls of a module in a pass, and tells which of them begins, also when it is repeated."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = 0
        # The calls with gradients that were not passed over, in order; with their reentrant checkpoint, which lives as
        # long as it may be repeated.
        self._ran: list[tuple[int, weakref.ref[Any] | None]] = []

    def begin(self) -> None:
        """Begin a forward pass of the model."""
        self.done, self._ran = 0, []

    @property
    def is_done(self) -> bool:
        """Whether all calls of a pass have begun."""
        return self.done >= self.number

    def pass_over(self) -> None:
        """Count the next call as done; its block is skipped in this forward pass."""
        self.done += 1

    def next(self) -> int:
        """Return the index of the call that begins now, from 0."""
        if not in_backward():
            call = self.done
            self.done += 1
            if self.number > 1 and not torch.compiler.is_compiling():
                around = None if torch.is_grad_enabled() else checkpoint_around()
                if around is not None or torch.is_grad_enabled():
                    self._ran.append((call, None if around is None else weakref.ref(around)))
            return call
        if self.number == 1:
            return 0
        self._ran = [each for each in self._ran if each[1] is None or each[1]() is not None]
        if self._ran:
            # Gradient checkpointing recomputes a shared module's calls during the backward pass, last call first. After
            # the first call comes the last again, for a second backward pass.
            self._ran = [self._ran[-1], *self._ran[:-1]]
            return self._ran[0][0]
        call = self.done % self.number
        self.done += 1
        return call

    def __getstate__(self) -> dict[str, Any]:
        return {"number": self.number, "done": self.done, "_ran": []}


@dataclass(frozen=True)
class MaskedCall:
    """Whether one call of a module was masked in a checkpoint."""

    acts: bool  # whether it was
    state: tuple[Any, ...]  # what masks depend on besides the seed
    # the checkpoint, which lives as long as it waits for its backward pass
    checkpoint: weakref.ref[Any] | None = field(default=None, compare=False)


class MaskedCalls:
    """Whether the calls of modules that gradient checkpointing will repeat were masked."""

    def __init__(self, provider: Regularizer) -> None:
        self._provider = provider
        self._done: Computations[MaskedCall] = Computations()

    def note(self, place: Hashable, module: nn.Module, *, acts: bool, has_gradients: bool) -> None:
        """Note whether a call of a module is masked, if a checkpoint runs it in a pass with gradients."""
        if torch.compiler.is_compiling() or not has_gradients or not in_checkpoint():
            return
        around = checkpoint_around()
        checkpoint = None if around is None else weakref.ref(around)
        self._done.note(place, mark(), MaskedCall(acts, self._state(module), checkpoint))

    def again(self, place: Hashable, name: str, module: nn.Module, *, acts: bool) -> bool:
        """Return whether a call that is repeated now was masked; ``acts`` is whether it would be now.

        Raises:
            RuntimeError: if it is not known, or the masks would be others.
        """
        found, is_marked = self._done.candidates(place)
        if not is_marked:  # it may be one from before the latest step
            found = [] if self._done.lost(_is_masked_and_alive) else waiting(found)
        if len({each.what for each in found}) != 1:
            if not found and not acts and not self.waits():
                return False
            raise RuntimeError(
                f"Gradient checkpointing repeats {name}, but it is not known whether it was masked: its forward pass "
                "began without gradients, or before `attach` or `handle.step()`, or is one of several. Run each "
                "backward pass before these and before the next forward pass, and use `use_reentrant=False`."
            )
        for each in found:
            each.repeated = True
        was = found[0].what
        if was.acts and was.state != self._state(module):
            raise RuntimeError(
                f"Gradient checkpointing cannot repeat the masks of {type(self._provider).__name__} at {name}, because "
                "its settings or epoch, or the training mode, have changed since the forward pass. Run the backward "
                "pass before `eval()`, `on_epoch()` and new rates."
            )
        return was.acts

    def waits(self) -> bool:
        """Whether any checkpoint that was masked waits for its backward pass."""
        return self._done.waits(_is_masked_and_alive)

    def forget(self) -> None:
        """Forget all passes, because the step is done."""
        self._done.forget(_is_masked_and_alive)

    def _state(self, module: nn.Module) -> tuple[Any, ...]:
        settings = (
            (name, value)
            for each in self._provider.parts()
            for name, value in vars(each).items()
            if name == "training" or (name[0] != "_" and isinstance(value, (bool, int, float, str)))
        )
        return module.training, self._provider.active, *settings


def _is_masked_and_alive(was: MaskedCall) -> bool:
    return was.acts and was.checkpoint is not None and was.checkpoint() is not None
