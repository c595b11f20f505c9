"""Find attention that a method of the model computes, and that its forward has not reached in the dry run."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from attnreg.errors import CoverageWarning
from attnreg.injection.backends import BY_FUNCTION
from attnreg.injection.discovery.finder import Method, Sighting, running_methods
from attnreg.injection.running.passes import Passes
from attnreg.injection.running.shadow import Shadow
from attnreg.injection.running.soft_masks import MULTIPLIES


class Unplanned(TorchFunctionMode):
    """Notes whether attention runs that is in none of the known methods of modules."""

    def __init__(self, known: Set[Method]) -> None:
        super().__init__()
        self.found = False
        self._known = known
        self._weights: dict[int, Tensor] = {}  # what a backend returned, or was made of it, by id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.found or torch.compiler.is_compiling():
            return output
        backend = BY_FUNCTION.get(func)
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        weights = [each for each in given if id(each) in self._weights]
        if (backend is not None and not backend.returns_weights) or (weights and func in MULTIPLIES):
            own = WatchedMethod.forward.__code__
            frames = itertools.takewhile(lambda each: each[0].f_code is not own, running_methods())
            self.found = not any(method in self._known for _, method in frames)
        elif isinstance(output, Tensor) and (backend is not None or any(x.numel() == output.numel() for x in weights)):
            self._weights[id(output)] = output
        return output


class WatchedMethod(Shadow[None]):
    """A method of the model; when it first runs in training, attention in it that is not masked is said.

    ``known`` are the methods in which the dry run has seen attention.
    """

    begins = False

    def __init__(self, passes: Passes, model: nn.Module, method: str, known: Set[Method]) -> None:
        super().__init__(passes, model, (None,), type(model).__name__, method=method)
        self._known = known
        self._has_run = False

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method, under :class:`Unplanned` if it is the first time."""
        if self._has_run or torch.compiler.is_compiling() or not self.passes.acts_on(self.module):
            return self.plain(*args, **kwargs)
        with Unplanned(self._known) as unplanned:
            output = self.plain(*args, **kwargs)
        self._has_run = True
        if unplanned.found:
            warnings.warn(
                f"`{self.name}.{self.method}` computes attention that is not masked, because `{self.name}.forward` did "
                "not reach it when the model was attached. To mask it, attach to a module whose forward calls this "
                "method; to silence this warning, choose what to mask with `modules=...`.",
                CoverageWarning,
                stacklevel=3,
            )
        return output


def watched_methods(
    passes: Passes, model: nn.Module, sightings: Iterable[Sighting], attached: Set[Method]
) -> list[WatchedMethod]:
    """Return the public methods of a model's own classes that are not attached."""
    known = set(attached)
    for sighting in sightings:
        known |= {(sighting.place.module, "forward"), *sighting.methods}
    return [
        WatchedMethod(passes, model, name, known)
        for name in dict.fromkeys(_public(type(model)))
        if (model, name) not in attached
    ]


def _public(kind: type[nn.Module]) -> Iterator[str]:
    own = itertools.takewhile(lambda each: each is not nn.Module and each.__name__ != "PreTrainedModel", kind.__mro__)
    for name, value in itertools.chain.from_iterable(vars(each).items() for each in own):
        if inspect.isfunction(value) and not name.startswith("_") and not hasattr(nn.Module, name):
            yield name
