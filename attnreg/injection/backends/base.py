"""The base class of backends, and the interfaces that they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnreg.draws import Drawn
from attnreg.injection.backends.allowed import Allowed
from attnreg.injection.backends.layout import Layout
from attnreg.masks import Mask
from attnreg.sites import SiteInfo

#: ``"rows"`` have different queries and keys, such as an image or window per part, and another batch may have more;
#: ``"blocks"`` have different queries, and layouts may differ (chunks of queries, block-sparse attention);
#: ``"values"`` have the same queries and keys, but different values
Parts = Literal["rows", "blocks", "values"]

BY_FUNCTION: dict[Callable[..., Any], Backend] = {}


@dataclass(frozen=True)
class Call:
    """One call of a function that may compute attention, as discovery sees it."""

    shape: tuple[int, ...]  # shape of the scores
    dim: int = -1  # the dimension of the keys
    scores: Tensor | None = None  # if they are an argument of the function
    query: Tensor | None = None  # ``(..., Q, D)``, if it is an argument of the function
    key: Tensor | None = None  # ``(..., K, D)``, if there is a ``query``; may have fewer heads
    valid: Tensor | None = None  # bool, broadcastable to ``shape``: what the model allows; ``None`` allows all


@dataclass(frozen=True)
class Asked:
    """An attention whose mask the provider is asked for: its site, and the layout of its scores."""

    info: SiteInfo
    layout: Layout
    again: bool = False  # whether queries and keys are those of the call before, and only values differ
    parts: Parts | None = None  # how the attention is split, if it is computed in several parts


class Tap(nn.Module):
    """Passes attention weights or their replacement through, so that hooks (captum's too) see them as its output.

    With ``at_output``, the output of a fused kernel passes instead, if there is a kernel, no weights are dropped, and
    one call computes the site. The weights are then never computed.
    """

    def __init__(self, replacement: Tensor | None = None, *, at_output: bool = False) -> None:
        super().__init__()
        self.replacement = replacement
        self.at_output = at_output
        #: V, ``(B, H_kv, K, D)``, if the output passed through; else ``None``
        self.values: Tensor | None = None

    def forward(self, weights: Tensor) -> Tensor:
        """Return the weights ``(B, H, Q, K)``; they require a gradient even if no earlier parameter does."""
        if self.replacement is not None:
            return self.replacement.to(weights.dtype)
        if torch.is_grad_enabled() and not weights.requires_grad:
            return weights.detach().requires_grad_()
        return weights

    def output(self, out: Tensor, values: Tensor) -> Tensor:
        """Pass an output ``(B, H, Q, D)`` through instead of weights, and note the values of its keys."""
        self.values = values.detach()
        return self(out)


class Watching(TorchFunctionMode):
    """A mode that sees all calls of backends' functions, to find attention or to mask it."""

    heads: int | None = None  # H, if it is an argument of the function that is running

    def has_grad(self) -> bool:
        """Whether gradients are enabled, or were when a repeated pass was computed first."""
        return torch.is_grad_enabled()

    @contextmanager
    def of_heads(self, heads: int | None) -> Iterator[None]:
        """Read scores as ``(B, H, Q, K)`` or ``(B * H, Q, K)`` with this H within the block."""
        outer, self.heads = self.heads, heads
        try:
            yield
        finally:
            self.heads = outer


class Masking(Watching):
    """The interface between backends and the mode that is active while an attached module runs."""

    is_quiet: bool = False  # whether it is known that nothing repeats, records, compiles or transforms the pass
    tap: Tap | None = None
    taps_output: bool = False  # whether the output of a fused kernel may pass through the tap instead of the weights

    @abstractmethod
    def expect(self, backend: str, shape: tuple[int, ...]) -> Asked | None:
        """Return the site of a call with scores of this shape; ``None`` if the call is not to be changed.

        It raises if there is more attention than when the model was attached.
        """

    @abstractmethod
    def read(self, mask: Tensor | None, is_causal: bool, queries: int, keys: int, device: torch.device) -> Allowed:
        """Read the mask arguments of torch's fused attention, once per pass for the same arguments."""

    @abstractmethod
    def ask(self, site: Asked, shape: tuple[int, ...], allowed: Allowed, *, like: Tensor, **fields: Any) -> Mask | None:
        """Return the provider's mask for a site, checked and on the right device; ``None`` keeps everything.

        ``fields`` are more fields of :class:`attnreg.AttentionSite`, whose device and dtype are those of ``like``.
        """

    @abstractmethod
    def note(self, mask: Mask | None) -> None:
        """Record the drop rate of a site's mask."""

    @abstractmethod
    def count(self, kept: Tensor | None, factor: Tensor | None = None) -> None:
        """Record the drop rate of a tensor that is 0 where a unit is dropped, and of a factor of the output."""

    @abstractmethod
    def counter(self, factor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return a counter, int64, 0-d, to which a kernel adds the units that it drops, and the query rows that count.

        The rows are bool, broadcastable to ``(B, H, Q, 1)``; ``None`` for all. Rows whose ``factor`` is 0 are dropped
        already. Without a counter, nothing is to be counted.
        """

    @abstractmethod
    def own_dropout(self, query: Tensor, shape: tuple[int, ...], p: float) -> Drawn:
        """Return decisions of the model's own dropout of weights; kept weights are divided by 1 - p."""

    @abstractmethod
    def allowed(self, scores: Tensor) -> Tensor:
        """Return the positions of scores ``(B, H, Q, K)`` that the model's mask, already added, allows."""

    @abstractmethod
    def finish(self, layout: Layout, weights: Tensor, mask: Mask | None, valid: Tensor | None) -> Tensor:
        """Apply the factors of a mask, and the tap, to attention weights ``(B, H, Q, K)`` after the softmax."""


class Noting(Watching):
    """The interface between backends and the mode that is active in the dry run."""

    @abstractmethod
    def note(self, backend: str, call: Call, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the attention that a call may compute, and run the call."""


class Backend(ABC):
    """Functions that compute attention: how to read a call of them, and how to mask it.

    To add a backend, add a file to this folder with a subclass and an instance of it called ``BACKEND``.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    modules: tuple[type[nn.Module], ...] = ()  #: modules that only call one of the functions

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
