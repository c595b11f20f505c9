"""One forward pass of an attached model: its module, its calls so far, its seed and the seeds of its sites."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import (
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)

from attnreg import functional
from attnreg.draws import Batch, generator_states, new_seed
from attnreg.functional.seeded import is_traced, transformed
from attnreg.injection.backends.allowed import Allowed
from attnreg.injection.running.padding import Padding
from attnreg.regularizer.base import Regularizer
from attnreg.sites import Stack, Where

Place = Literal["attention", "block"] | Where

PLACES, STACKS = ("attention", "block", *get_args(Where)), get_args(Stack)
KINDS = {kind: number for number, kind in enumerate(itertools.product(PLACES, STACKS))}
NUMBER_OF_KINDS = len(KINDS)
PREPARATION = -1  # number of the seed for draws in `prepare`; sites have numbers from 0


@dataclass(eq=False)
class Pass:
    """One forward pass of an attached model, or of a part of it."""

    module: nn.Module | None = None  # the module at which it began
    whole: bool = True  # whether this module contains all attention
    is_open: bool = False  # whether it goes on when another part of the model is called
    acts: bool = False  # whether the provider masked any module when it began
    is_checked: bool = False  # whether it is known that all masked modules ran in it
    with_gradients: bool = False  # whether gradients were enabled when it began
    lists_attention: bool = False  # whether the model returns the weights of every layer
    is_running: bool = False  # whether the module, or another part of the model in this pass, is running
    active: bool | None = None  # whether the provider acts in it; ``None`` if that is not known yet
    allowed: dict[Any, Allowed] = field(default_factory=dict)  # the positions that masks allow, by mask, while it runs
    padding: Padding | None = None  # its padding masks, while it runs
    seed: Tensor | None = None  # the seed from which all its masks follow, once it draws
    mixed: int | None = None  # the seed as a mixed integer, from which the seeds of sites are derived
    generator_hash: int = 0  # of the state of torch's generator when the seed was drawn
    drew_in_prepare: bool = False  # whether the provider drew in `prepare`, before any site
    # number of draws so far, by kind and layer
    counts: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    own_counts: dict[tuple[str, int], int] = field(default_factory=dict)  # of the model's own draws, by module and kind
    batch: Batch | None = None  # its samples and tokens, if the model's own draws need them
    original: Pass | None = None  # the pass that this one repeats

    @property
    def has_gradients(self) -> bool:
        """Whether a computation that runs now has gradients."""
        return self.with_gradients if self.is_running else torch.is_grad_enabled()

    def again(self) -> Pass:
        """Return a pass that goes on from the present state of this one, and will draw the same numbers."""
        fields: Any = {"counts": self.counts.copy(), "own_counts": dict(self.own_counts), "allowed": {}, "active": None}
        return replace(self, original=self.original or self, **fields)


@dataclass(eq=False)
class Calls:
    """Counts the calls of a module in a pass."""

    number: int  # of calls in a whole pass
    done: int = 0  # that have begun


def seed_of_pass(replayed: Tensor | None = None) -> Tensor:
    """Draw the seed of a pass from torch's generator, which moves also if a ``replayed`` seed is returned instead."""
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and torch._functorch.config.activation_memory_budget < 1:
        # Without `fullgraph`, torch then runs this uncompiled, and the seed is drawn once.
        raise RuntimeError(
            "With `torch._functorch.config.activation_memory_budget` below 1, a compiled backward pass would draw its "
            "masks again, and they would differ. Use gradient checkpointing instead."
        )
    if replayed is None and not is_compiling and transformed():
        new_seed()  # raises if `vmap` allows no randomness
    with _untransformed():
        drawn = new_seed()
    return drawn if replayed is None else replayed


@contextmanager
def without_global_draws(provider: Regularizer) -> Iterator[None]:
    """Raise if a global generator moves within the block, except by the one seed that a pass or a site draws."""
    with _untransformed():
        states, generator = generator_states(), torch.Generator()
        generator.set_state(torch.get_rng_state())
        new_seed(generator)
        advanced = {**states, "torch's": generator.get_state().numpy().tobytes()}
    yield
    with _untransformed():
        after = generator_states()
    if after not in (states, advanced):
        raise RuntimeError(
            f"The masks of {type(provider).__name__} cannot be repeated, because it draws from a global generator"
            f"{', or another thread does' if threading.active_count() > 1 else ''}. "
            "A regularizer must draw with `site.keep(p)` or `site.uniform()`, or in `prepare` from `draws_of_pass()`."
        )


def numbered_seed(seed: Tensor, number: int) -> int | Tensor:
    """Derive another seed for every number."""
    derived = functional.fold_seed(seed if is_traced() else int(seed), number)
    return derived if torch.compiler.is_compiling() else _of_elements(derived)


def _of_elements(seed: int | Tensor) -> int | Tensor:
    """Derive another seed for every element of every ``vmap(..., randomness="different")`` that is running."""
    for transform in retrieve_all_functorch_interpreters() if transformed() else ():
        if isinstance(transform, VmapInterpreter) and transform.randomness() == "different":
            with _untransformed():
                elements = torch.arange(transform.batch_size())
            index: Any = torch._C._functorch._add_batch_dim(elements, 0, transform.level())
            seed = functional.fold_seed(seed, index)
    return seed


def _untransformed() -> AbstractContextManager[Any]:
    """Make tensors within the block that may outlive the function transforms that are running."""
    if torch.compiler.is_compiling() or not transformed():
        return nullcontext()
    return temporarily_clear_interpreter_stack()
