"""Linear layers that compute with replaced weights in training mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.errors import InputError


def use_weights(layer: nn.Linear, weight_of: Callable[[nn.Linear], Tensor]) -> None:
    """Let a layer compute with the weights that a function returns: a module-level one or a partial, to be pickled."""
    layer.forward = functools.partial(_forward, layer, weight_of)  # type: ignore[method-assign]


def use_own_weights(layers: Iterable[nn.Linear]) -> None:
    """Let layers compute with their weights again, unless something else has replaced their forward since."""
    for layer in layers:
        forward = vars(layer).get("forward")
        if isinstance(forward, functools.partial) and forward.func is _forward:
            del layer.forward


def check_free(layers: Mapping[str, nn.Linear], title: str) -> None:
    """Refuse layers whose forward something has replaced."""
    if taken := [name for name, layer in layers.items() if "forward" in vars(layer)]:
        raise InputError(f"{title} cannot replace the forward of {taken[0]}: something else has replaced it.")


# A partial of a module-level function can be pickled and copied with the model; a closure could not.
def _forward(layer: nn.Linear, weight_of: Callable[[nn.Linear], Tensor], x: Tensor) -> Tensor:
    return F.linear(x, weight_of(layer) if layer.training else layer.weight, layer.bias)
