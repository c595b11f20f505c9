"""What a way of computing attention has to say of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from attnreg.injection.layout import Layout
from attnreg.injection.tap import Tap
from attnreg.masks import Mask, SiteInfo

BY_FUNCTION: dict[Callable[..., Any], Backend] = {}


@dataclass(frozen=True)
class Call:
    """One call of a function that may compute attention, as discovery sees it.

    Args:
        shape: of the scores.
        dim: the dimension of the keys.
        scores: the scores themselves, where they are an argument.
        query: ``(..., Q, D)``, where it is an argument, and then so is ``key``, ``(..., K, D)``.
        key: may have fewer heads than ``query``.
        valid: bool, broadcastable to ``shape``: what the model allows; ``None`` where it allows everything.
    """

    shape: tuple[int, ...]
    dim: int = -1
    scores: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    valid: Tensor | None = None


@dataclass(frozen=True)
class Asked:
    """An attention that is about to be computed: its site, and the layout of its scores."""

    info: SiteInfo
    layout: Layout
    again: bool = False  # for other values


class Masking(AbstractContextManager[Any], Protocol):
    """What a backend asks for while an attached module runs: :class:`attnreg.injection.mode.AttentionMode`."""

    tap: Tap | None

    def expect(self, backend: str, call: Call) -> Asked | None:
        """The site of a call; ``None`` to leave the call alone."""

    def ask(
        self,
        site: Asked,
        shape: tuple[int, ...],
        valid: Tensor | None,
        *,
        like: Tensor,
        query: Tensor | None = None,
        key: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        scores: Tensor | None = None,
        score_mod: Callable[..., Tensor] | None = None,
    ) -> Mask | None:
        """The provider's mask for a site; ``None`` where it keeps everything."""

    def finish(self, layout: Layout, weights: Tensor, mask: Mask | None, valid: Tensor | None) -> Tensor:
        """Attention weights after the softmax, under the factors of a mask and through the tap."""

    def of_heads(self, heads: int) -> AbstractContextManager[None]:
        """Within the block, scores have this number of heads."""


class Noting(AbstractContextManager[Any], Protocol):
    """What a backend asks for in the dry run: :class:`attnreg.injection.discovery.finder.Finder`."""

    def note(self, backend: str, call: Call, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a call and run it."""

    def of_heads(self, heads: int) -> AbstractContextManager[None]:
        """Within the block, scores have this number of heads."""


class Backend(ABC):
    """One way in which models compute attention: which functions, how a call is read, how masks are put into it.

    A file of this folder with a subclass and an instance of it called ``BACKEND`` is all that a further way costs.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]

    def __init__(self) -> None:
        for function in self.functions:
            BY_FUNCTION[function] = self

    @abstractmethod
    def read(self, *args: Any, **kwargs: Any) -> Call | None:
        """What a call with these arguments computes; ``None`` if it is certainly no attention."""

    @abstractmethod
    def intercept(self, mode: Masking, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The call, with the provider's mask in it."""

    def discover(self, finder: Noting, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The call in the dry run: note it and run it."""
        call = self.read(*args, **kwargs)
        if call is None:
            return func(*args, **kwargs)
        return finder.note(self.name, call, func, *args, **kwargs)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within the block, calls of these functions reach a torch function mode; override where they do not."""
        yield

    @property
    def needs_patches(self) -> bool:
        """Whether :meth:`patched` does something."""
        return type(self).patched is not Backend.patched
