"""The base class of backends, and the interfaces that they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from attnreg.injection.layout import Layout
from attnreg.injection.lazy_site import FindValid
from attnreg.injection.tap import Tap
from attnreg.masks import Mask
from attnreg.sites import SiteInfo

BY_FUNCTION: dict[Callable[..., Any], Backend] = {}


@dataclass(frozen=True)
class Call:
    """One call of a function that may compute attention, as discovery sees it.

    Args:
        shape: shape of the scores.
        dim: the dimension of the keys.
        scores: the scores, if they are an argument of the function.
        query: ``(..., Q, D)``, if it is an argument of the function.
        key: ``(..., K, D)``, given with ``query``; may have fewer heads.
        valid: bool, broadcastable to ``shape``: the positions that the model allows; ``None`` allows all.
    """

    shape: tuple[int, ...]
    dim: int = -1
    scores: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    valid: Tensor | None = None


@dataclass(frozen=True)
class Asked:
    """An attention about to be computed: its site, and the layout of its scores."""

    info: SiteInfo
    layout: Layout
    again: bool = False  # the same queries and keys as before, with other values


class Masking(AbstractContextManager[Any], Protocol):
    """What backends use of :class:`attnreg.injection.mode.AttentionMode`, while an attached module runs."""

    tap: Tap | None
    taps_output: bool  # whether the output of a fused kernel may pass through the tap instead of the weights

    def expect(self, backend: str, call: Call) -> Asked | None:
        """Return the site of a call; ``None`` to leave the call unchanged."""

    def ask(
        self, site: Asked, shape: tuple[int, ...], valid: Tensor | FindValid | None, *, like: Tensor, **given: Any
    ) -> Mask | None:
        """Return the provider's mask for a site, given more fields of it by name; ``None`` keeps everything.

        ``valid`` may be a function that finds the valid positions when they are needed.
        """

    def finish(self, layout: Layout, weights: Tensor, mask: Mask | None, valid: Tensor | None) -> Tensor:
        """Apply the factors of a mask, and the tap, to attention weights after the softmax."""

    def of_heads(self, heads: int) -> AbstractContextManager[None]:
        """Read scores with this number of heads within the block."""


class Noting(AbstractContextManager[Any], Protocol):
    """What backends use of :class:`attnreg.injection.discovery.finder.Finder`, in the dry run."""

    def note(self, backend: str, call: Call, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a call and run it."""

    def of_heads(self, heads: int) -> AbstractContextManager[None]:
        """Read scores with this number of heads within the block."""


class Backend(ABC):
    """Functions that compute attention: how to read a call of them, and how to mask it.

    To add a backend, add a file to this folder with a subclass and an instance of it called ``BACKEND``.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]

    def __init__(self) -> None:
        for function in self.functions:
            BY_FUNCTION[function] = self

    @abstractmethod
    def read(self, *args: Any, **kwargs: Any) -> Call | None:
        """Read a call with these arguments; ``None`` if it cannot be attention."""

    @abstractmethod
    def intercept(self, mode: Masking, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the call with the provider's mask."""

    def discover(self, finder: Noting, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the call in the dry run, and run it."""
        call = self.read(*args, **kwargs)
        if call is None:
            return func(*args, **kwargs)
        return finder.note(self.name, call, func, *args, **kwargs)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Make calls of these functions reach a torch function mode within the block; override if they do not."""
        yield

    @property
    def needs_patches(self) -> bool:
        """Whether :meth:`patched` is overridden."""
        return type(self).patched is not Backend.patched
