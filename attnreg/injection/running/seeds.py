"""The seeds of forward passes and of their sites, also in passes that gradient checkpointing repeats."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import (
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)

from attnreg import functional
from attnreg.draws import Draws, new_seed
from attnreg.functional.seeded import is_traced, transformed
from attnreg.injection.running.forward_pass import Pass
from attnreg.injection.running.repetition import Computations, in_backward, in_checkpoint, mark, waiting
from attnreg.regularizer.base import Regularizer
from attnreg.sites import Site, Stack, Where

Place = Literal["attention", "block"] | Where

PLACES, STACKS = ("attention", "block", *get_args(Where)), get_args(Stack)
BEFORE_THE_SITES = -1


@dataclass(frozen=True)
class _Seed:
    """The seed of one computation."""

    seed: int
    number: int  # of the forward pass
    began: bool  # whether it was the first to draw in this pass
    rows: Tensor | None = None  # index of each sample in a larger batch


class Seeds:
    """One seed for each forward pass that draws, and one for each computation in it, which follows from that."""

    def __init__(self) -> None:
        self.latest: Tensor | None = None  # seed of the latest pass that drew
        self._given: Tensor | None = None  # seed of all passes, if they repeat one
        self._after: Tensor | None = None
        self._number = 0
        self._done: Computations[_Seed] = Computations()

    @contextmanager
    def giving(self, seed: Tensor) -> Iterator[None]:
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

    def begin(self, now: Pass) -> Draws:
        """Begin a forward pass; return the source of what is drawn before its sites."""
        if not torch.compiler.is_compiling():
            self._number += 1
        return Draws(functools.partial(self._before_the_sites, now), replayed=self._given is not None)

    def repeat(self, now: Pass) -> None:
        """Repeat the beginning of a forward pass, so that the generator is where it was."""
        if now.drew_first:
            new_seed()

    def end(self, now: Pass) -> None:
        """End a forward pass, or repeat its end; what is computed after it finds the generator elsewhere."""
        if now.seed is not None and (torch.compiler.is_compiling() or not transformed()):
            self._after = new_seed()  # kept, because compiled code leaves out what nobody needs

    def of(self, now: Pass, site: Site, place: Place, *, has_gradients: bool, only_latest: str | None) -> Draws:
        """Return the source of what is drawn now at a place, in ``now``, the latest pass in which the provider acts.

        ``only_latest`` names a provider that has masks for the latest pass only.
        """
        key, rows = (place, site.label), None if now.batch is None else now.batch.rows
        if is_traced():
            return Draws(functools.partial(self._next, now, key, site), samples=rows)
        if in_backward():
            again = functools.cache(functools.partial(self._again, key, site.name, only_latest))
            draws, known = Draws(lambda: again().seed, samples=lambda: again().rows), self._done.knows(key)
        else:
            noted = functools.partial(self._noted, now, key, site, has_gradients=has_gradients)
            draws, known = Draws(noted, samples=rows), now.seed is not None
        if only_latest is not None and known:
            # This provider draws before the sites, so a pass must be known again even if they do not draw.
            _ = draws.seed
        return draws

    def forget(self) -> None:
        """Forget all computations, because the step is done."""
        self._done.forget()

    def of_pass(self, now: Pass) -> Tensor:
        """Return the seed of a pass, which is drawn when it is first needed."""
        if now.seed is None:
            if torch.compiler.is_compiling() and torch._functorch.config.activation_memory_budget < 1:
                # Without `fullgraph`, torch then runs this uncompiled, and the seed is drawn once.
                raise RuntimeError(
                    "With `torch._functorch.config.activation_memory_budget` below 1, a compiled backward pass would "
                    "draw its masks again, and others. Use gradient checkpointing instead."
                )
            if self._given is None and not torch.compiler.is_compiling() and transformed():
                new_seed()  # raises if `vmap` allows no randomness
            with _untransformed():
                drawn = new_seed()
            now.seed = self.latest = drawn if self._given is None else self._given
        return now.seed

    def _before_the_sites(self, now: Pass) -> int | Tensor:
        now.drew_first = True
        return _following(self.of_pass(now), BEFORE_THE_SITES)

    def _next(self, now: Pass, key: tuple[Place, str], site: Site) -> int | Tensor:
        count = now.counts.get(key, 0)
        now.counts[key] = count + 1
        kind = PLACES.index(key[0]) * len(STACKS) + STACKS.index(site.stack)
        return _following(self.of_pass(now), ((count * len(PLACES) * len(STACKS) + kind) << 32) + site.layer)

    def _noted(self, now: Pass, key: tuple[Place, str], site: Site, *, has_gradients: bool) -> int | Tensor:
        if not (has_gradients and in_checkpoint()):
            return self._next(now, key, site)
        here, begins, rows = mark(), now.seed is None, None if now.batch is None else now.batch.rows
        seed = self._next(now, key, site)
        self._done.note(key, here, _Seed(int(seed), self._number, begins, rows))
        return seed

    def _again(self, key: tuple[Place, str], name: str, only_latest: str | None) -> _Seed:
        found, is_marked = self._done.candidates(key)
        found = found if is_marked else waiting(found)
        if len({(each.what.seed, id(each.what.rows)) for each in found}) != 1:
            raise RuntimeError(
                f"Gradient checkpointing repeats {name} without its random state, and any of {len(found)} forward "
                "passes may be the one: use `preserve_rng_state=True` (the default), or call `handle.step()` after "
                "each optimizer step."
            )
        computation = found[-1]
        if only_latest is not None and computation.what.number != self._number:
            raise RuntimeError(
                f"{only_latest} draws its masks when a forward pass begins, and gradient checkpointing repeats {name} "
                "of an earlier one: run the backward pass of each forward pass before the next."
            )
        computation.repeated = True
        if computation.what.began and is_marked:
            new_seed()  # so that the generator is where it was
        return computation.what

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": None}


@contextmanager
def _still(provider: Regularizer, device: torch.device | None) -> Iterator[None]:
    """Raise if torch's generators move within the block, other than by the one seed that a pass or a site draws."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    with _untransformed():
        new_seed(generator)
    on_gpu = None if device is None or device.type != "cuda" else torch.cuda.get_rng_state(device)
    before = torch.get_rng_state()
    yield
    after = torch.get_rng_state()
    moved = not (torch.equal(after, before) or torch.equal(after, generator.get_state()))
    if moved or (on_gpu is not None and not torch.equal(on_gpu, torch.cuda.get_rng_state(device or "cuda"))):
        raise RuntimeError(
            f"The masks of {type(provider).__name__} cannot be repeated, because it draws from torch's own generator"
            f"{', or another thread does' if threading.active_count() > 1 else ''}. "
            "A regularizer must draw with `site.keep(p)` or `site.uniform()`, or in `prepare` from `draws_of_pass()`."
        )


def _following(seed: Tensor, number: int) -> int | Tensor:
    following = functional.fold_seed(seed if is_traced() else int(seed), number)
    return following if torch.compiler.is_compiling() else _of_elements(following)


def _of_elements(seed: int | Tensor) -> int | Tensor:
    """Return a seed of its own for each element of every ``vmap(..., randomness="different")`` that is running."""
    for running in retrieve_all_functorch_interpreters() if transformed() else ():
        if isinstance(running, VmapInterpreter) and running.randomness() == "different":
            with _untransformed():
                elements = torch.arange(running.batch_size())
            index: Any = torch._C._functorch._add_batch_dim(elements, 0, running.level())
            seed = functional.fold_seed(seed, index)
    return seed


def _untransformed() -> AbstractContextManager[Any]:
    """Make tensors within the block that may outlive the function transforms that are running."""
    if torch.compiler.is_compiling() or not transformed():
        return nullcontext()
    return temporarily_clear_interpreter_stack()
