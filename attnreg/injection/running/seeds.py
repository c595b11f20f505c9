"""The seeds of forward passes and of their sites, also in passes that gradient checkpointing repeats."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attnreg import functional
from attnreg.draws import Draws, new_seed
from attnreg.functional.seeded import is_traced, transformed
from attnreg.injection.running.rates import in_backward
from attnreg.regularizer.base import Regularizer
from attnreg.sites import Site, Stack, Where

Place = Literal["attention", "block"] | Where

REMEMBERED = 64  # computations of a place
PLACES, STACKS = ("attention", "block", *get_args(Where)), get_args(Stack)
BEFORE_THE_SITES = -1


@dataclass
class _Computation:
    """One computation at a place, in a forward pass with gradients."""

    mark: int  # of the state of torch's generator, by which this computation is known again
    seed: int
    number: int  # of the forward pass
    began: bool  # whether it was the first to draw in this pass
    repeated: bool = False


class Seeds:
    """One seed for each forward pass that draws, and one for each computation in it, which follows from that.

    Gradient checkpointing repeats a part of a forward pass during the backward pass, and tells nobody which part. So
    the state of torch's generator marks each computation. If checkpointing sets the generator back, as it does by
    default, the same mark comes again and names the computation. Otherwise (``preserve_rng_state=False``), it must be
    the only one at its place that has not been repeated since the latest optimizer step.
    """

    def __init__(self) -> None:
        self.latest: Tensor | None = None  # seed of the latest pass that drew
        self._seed: Tensor | None = None  # of the present pass, once it draws
        self._drew_first = False  # whether the latest pass drew before its sites
        self._after: Tensor | None = None
        self._number = 0
        self._given: Tensor | None = None
        self._counts: dict[tuple[Place, str], int] = {}
        self._done: dict[tuple[Place, str], deque[_Computation]] = {}

    @contextmanager
    def given(self, seed: Tensor) -> Iterator[None]:
        """Give all forward passes within the block this seed."""
        before, self._given = self._given, seed
        try:
            yield
        finally:
            self._given = before

    def asking(self, provider: Regularizer, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Check within the block that a provider whose masks are repeated draws nothing else."""
        if self._given is None or torch.compiler.is_compiling():
            return nullcontext()
        return _still(provider, device)

    def begin(self) -> Draws:
        """Begin a forward pass; return the source of what is drawn before its sites."""
        self._seed = None
        self._counts = {}
        self._drew_first = False
        if not torch.compiler.is_compiling():
            if transformed():
                return Draws()
            self._number += 1
        return Draws(self._before_the_sites, replayed=self._given is not None)

    def repeat(self) -> None:
        """Repeat the beginning of a forward pass, so that the generator is where it was."""
        if self._drew_first:
            new_seed()

    def end(self) -> None:
        """End a forward pass, or repeat its end; what is computed after it finds the generator elsewhere."""
        if self._seed is not None:
            self._after = new_seed()  # kept, because compiled code leaves out what nobody needs

    def of(self, site: Site, place: Place, *, in_forward: bool, has_gradients: bool, only_latest: str | None) -> Draws:
        """Return the source of what is drawn now at a place.

        ``only_latest`` names a provider that has masks for the latest forward pass only.
        """
        key = place, site.label
        if torch.compiler.is_compiling():
            return Draws(functools.partial(self._next, key, site))
        if transformed():
            return Draws()
        if in_backward():
            draws = Draws(functools.partial(self._again, key, site.name, only_latest))
            known = bool(self._done.get(key))
        else:
            noted = functools.partial(self._noted, key, site, in_forward=in_forward, has_gradients=has_gradients)
            draws, known = Draws(noted), self._seed is not None
        if only_latest is not None and known:
            _ = (
                draws.seed
            )  # this provider draws before the sites, so a pass must be known again even if they do not draw
        return draws

    def forget(self) -> None:
        """Forget all computations, because the step is done."""
        self._done = {}

    def _of_pass(self) -> Tensor:
        if self._seed is None:
            drawn = new_seed()
            self._seed = self.latest = drawn if self._given is None else self._given
        return self._seed

    def _before_the_sites(self) -> int | Tensor:
        self._drew_first = True
        return _following(self._of_pass(), BEFORE_THE_SITES)

    def _next(self, key: tuple[Place, str], site: Site) -> int | Tensor:
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        kind = PLACES.index(key[0]) * len(STACKS) + STACKS.index(site.stack)
        return _following(self._of_pass(), ((count * len(PLACES) * len(STACKS) + kind) << 32) + site.layer)

    def _noted(self, key: tuple[Place, str], site: Site, *, in_forward: bool, has_gradients: bool) -> int | Tensor:
        here, begins = mark(), self._seed is None
        seed = self._next(key, site) if in_forward else new_seed()
        if has_gradients:
            done = self._done.setdefault(key, deque(maxlen=REMEMBERED))
            done.append(_Computation(here, int(seed), self._number, begins or not in_forward))
        return seed

    def _again(self, key: tuple[Place, str], name: str, only_latest: str | None) -> int:
        here, done = mark(), list(self._done.get(key, ()))
        found = [each for each in done if each.mark == here]
        parts = [each for each in found if each.number == found[-1].number]
        if len(parts) > 1 and len({each.seed for each in found}) == len(parts):
            # The parts of a site, in their order, which may be repeated again in a second backward pass.
            if all(each.repeated for each in parts):
                for each in parts:
                    each.repeated = False
            found = [next(each for each in parts if not each.repeated)]
        found = found or [each for each in done if not each.repeated] or done
        if len({each.seed for each in found}) != 1:
            raise RuntimeError(
                f"Gradient checkpointing repeats {name} without its random state, and any of {len(found)} forward "
                "passes may be the one: use `preserve_rng_state=True` (the default), or call `handle.step()` after "
                "each optimizer step."
            )
        computation = found[-1]
        if only_latest is not None and computation.number != self._number:
            raise RuntimeError(
                f"{only_latest} draws its masks when a forward pass begins, and gradient checkpointing repeats {name} "
                "of an earlier one: run the backward pass of each forward pass before the next."
            )
        computation.repeated = True
        if computation.began and computation.mark == here:
            new_seed()  # so that the generator is where it was
        return computation.seed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": None, "_done": {}}


@contextmanager
def _still(provider: Regularizer, device: torch.device | None) -> Iterator[None]:
    """Raise if torch's generators move within the block, other than by the one seed that a pass or a site draws."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    new_seed(generator)
    on_gpu = None if device is None or device.type != "cuda" else torch.cuda.get_rng_state(device)
    before = torch.get_rng_state()
    yield
    after = torch.get_rng_state()
    moved = not (torch.equal(after, before) or torch.equal(after, generator.get_state()))
    if moved or (on_gpu is not None and not torch.equal(on_gpu, torch.cuda.get_rng_state(device or "cuda"))):
        raise RuntimeError(
            f"The masks of {type(provider).__name__} cannot be repeated, because it draws from torch's own generator. "
            "A provider must draw with `site.keep(p)` or `site.uniform()`, or in `prepare` from `draws_of_pass()`."
        )


def mark() -> int:
    """Return a number that stands for the state of torch's generator."""
    return hash(torch.get_rng_state().numpy().tobytes())


def _following(seed: Tensor, number: int) -> int | Tensor:
    return functional.fold_seed(seed if is_traced() else int(seed), number)
