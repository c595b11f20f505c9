"""The residual connections of a block: what they add to its hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnreg.errors import InputError
from attnreg.injection.running.repetition import checkpoint_around
from attnreg.injection.running.soft_masks import functions

_ADDS = functions("add", "add_", "__add__", "__radd__", "__iadd__")
_NORMS = frozenset({F.layer_norm, F.rms_norm, *functions("layer_norm", "rms_norm")})


class ResidualConnections(TorchFunctionMode):
    """Changes what is added to the hidden states of a block, which must come from one addition to the next.

    A normalization between two additions, as after each of BERT's, goes along.
    """

    def __init__(self, name: str, states: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._name, self._change = name, change
        self._here = [states]  # the hidden states now, and normalized
        self._around = None if torch.compiler.is_compiling() else checkpoint_around()
        self._is_inside = False  # whether a checkpoint within the block would repeat an addition
        self._count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ADDS and len(args) == 2 and not kwargs:
            at = next((at for at in (0, 1) if self._holds(args[at])), None)
            if at is not None and isinstance(args[1 - at], Tensor) and args[1 - at].shape == args[at].shape:
                if not torch.compiler.is_compiling():
                    self._is_inside |= checkpoint_around() is not self._around
                update = self._change(args[1 - at])
                self._here = [func(update, args[1]) if at else func(args[0], update)]
                self._count += 1
                return self._here[0]
        result = func(*args, **kwargs)
        if func in _NORMS and self._holds(args[0]):
            self._here.append(result)
        return result

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward; raise unless its output is what its residual connections make of its input."""
        with self:
            output = forward(*args, **kwargs)
        states = output if isinstance(output, Tensor) else output[0]
        if self._is_inside or not (self._count and self._holds(states)):
            why = "run in a checkpoint inside of it" if self._is_inside else "do not lead from its input to its output"
            raise InputError(
                f"The residual connections of {self._name} {why}: use `where='output'`, or leave its layer out."
            )
        return output

    def _holds(self, value: Any) -> bool:
        return any(value is each for each in self._here)
