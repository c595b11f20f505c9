"""What holds for what runs now in an attached model, and how gradient checkpointing returns to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnreg.injection.backends import Tap
from attnreg.injection.running.forward_pass import Calls, Pass
from attnreg.injection.running.own_draws import OwnDraws
from attnreg.injection.running.rates import DropRates
from attnreg.injection.running.repetition import checkpoints_around


@dataclass(eq=False)
class Checkpoint:
    """What a gradient checkpoint needs to repeat a part of a forward pass as that was."""

    state: State  # in which it began
    calls: list[int]  # of each module, until it began
    settings: tuple[Any, ...]  # what masks depend on besides the seed
    begun: list[Pass] = field(default_factory=list)  # the passes that began in it
    acts: list[bool] = field(default_factory=list)  # whether each call of a module in it was masked
    is_repeated: bool = False


@dataclass(eq=False)
class Repetition:
    """How far a checkpoint has been repeated."""

    checkpoint: Checkpoint

    def __post_init__(self) -> None:
        self.begun, self.acts = iter([*self.checkpoint.begun]), iter([*self.checkpoint.acts])


@dataclass(eq=False)
class State:
    """What holds for what runs now. A checkpoint returns to it; a copy of the model begins anew."""

    latest: Pass = field(default_factory=Pass)
    mode: Any = None  # the mode of the innermost attention module that is running
    own: OwnDraws | None = None  # draws the model's own randomness, while it runs
    enabled: bool = True
    probing: bool = False
    taps: Mapping[str, Tap] = field(default_factory=dict)
    rows: Tensor | None = None  # index of each sample in a larger batch
    given: Tensor | None = None  # seed of all passes, if they repeat one
    repeats: Repetition | None = None  # what gradient checkpointing repeats

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
        self.latest.is_open = False
        try:
            yield
        finally:
            vars(self).update(before)
            self.latest.is_open = False

    def counted(self, number: int) -> Calls:
        """Return a counter of a module's calls, which begins anew with each pass."""
        self._calls.append(Calls(number))
        return self._calls[-1]

    def checkpoints(self) -> list[Checkpoint]:
        """Return the gradient checkpoints that run now; each will repeat what follows from the present state."""
        if torch.compiler.is_compiling():
            return []
        found = []
        for holder, attribute in checkpoints_around():
            checkpoint = self._checkpoints.get(holder)
            if checkpoint is None:
                calls = [each.done for each in self._calls]
                checkpoint = self._checkpoints[holder] = Checkpoint(self.now(), calls, self.settings())
                setattr(holder, attribute, functools.partial(self._repeat, checkpoint, getattr(holder, attribute)))
            found.append(checkpoint)
        return found

    def _repeat(self, checkpoint: Checkpoint, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the function of a checkpoint again, in the state in which it began."""
        checkpoint.is_repeated = True
        state = checkpoint.state.now()
        state.repeats = Repetition(checkpoint)
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
        return any(any(each.acts) and not each.is_repeated for each in self._checkpoints.values())

    def __getstate__(self) -> dict[str, Any]:
        # A copy made within a `with` block or a pass would never leave it.
        return {**vars(self), **vars(State()), "_checkpoints": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._checkpoints = WeakKeyDictionary()
