"""Which parameters of a provider belong to a site: those that learn have some for each layer of each stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attnreg.arguments import whole_number
from attnreg.errors import InputError
from attnreg.injection import discover
from attnreg.injection.selection import choose
from attnreg.masks import SiteInfo, Stack

Depth = int | Mapping[str, int]


class LayerIndex:
    """Counts the layers of all stacks, one stack after the other.

    Args:
        provider: name of its class, for messages.
        num_layers: number of layers, where the provider is to act on one stack; or by stack.

    Raises:
        InputError: if there is no layer, or fewer than one in a stack.

    Example:
        >>> index = LayerIndex("ConcreteDropout", {"encoder": 2, "decoder": 3})
        >>> len(index), index(SiteInfo(stack="decoder", layer=1, num_layers=3))
        (5, 3)
    """

    def __init__(self, provider: str, num_layers: Depth) -> None:
        self.provider = provider
        self.depth = dict(num_layers) if isinstance(num_layers, Mapping) else {"": num_layers}
        if not self.depth:
            raise InputError(f"Expected `num_layers` to be at least 1 (of each stack), got {num_layers!r}.")
        for layers in self.depth.values():
            whole_number("num_layers", layers)

    def __len__(self) -> int:
        return sum(self.depth.values())

    def __call__(self, site: SiteInfo) -> int:
        """The number of a site's layer."""
        begin = 0
        for stack, layers in self.depth.items():
            if stack in ("", site.stack) and site.layer < layers:
                return begin + site.layer
            begin += layers
        raise self._misfit({site.stack: site.num_layers})

    def check(self, sites: Iterable[SiteInfo]) -> None:
        """Raise if the sites are not those of the layers that were counted.

        Raises:
            InputError: if so.
        """
        found = {site.stack: site.num_layers for site in sites}
        single = "" in self.depth and len(found) == 1
        if any(self.depth.get("" if single else stack) != layers for stack, layers in found.items()):
            raise self._misfit(found)

    def _misfit(self, found: Mapping[Any, int]) -> InputError:
        made = ", ".join(f"{layers} {stack} layers".replace("  ", " ") for stack, layers in self.depth.items())
        got = ", ".join(f"{layers} {stack} layers" for stack, layers in found.items())
        return InputError(
            f"Expected {made}, for which this {self.provider} was made, got {got}: use "
            f"`{self.provider}.for_model(model)`."
        )


def found_in(model: nn.Module, stacks: Sequence[Stack] | None, example_inputs: Any) -> list[SiteInfo]:
    """The attention sites for which a provider is made: all self-attention by default, as for :func:`attnreg.attach`.

    Raises:
        InputError: if the model has none in these stacks.
        NoAttentionError: if no attention is seen in the model.
    """
    return [site.info for site in choose(discover(model, example_inputs), stacks=stacks)]


def device_of(model: nn.Module) -> torch.device:
    """Where a model is; the CPU if it has no parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def depth_of(found: Sequence[SiteInfo]) -> dict[str, int]:
    """Number of layers by stack."""
    return {str(site.stack): site.num_layers for site in found}


def heads_of(found: Sequence[SiteInfo]) -> int:
    """The number of heads that all sites share.

    Raises:
        InputError: if they differ.
    """
    heads = {site.heads for site in found}
    if len(heads) > 1 or None in heads:
        raise InputError(
            f"Expected the same number of heads in all layers, got {sorted(heads, key=str)}: choose `stacks`."
        )
    return heads.pop()  # type: ignore[return-value]


def head_size_of(found: Sequence[SiteInfo], provider: str) -> int:
    """The size of query vectors that all sites share.

    Raises:
        InputError: if they differ, or queries cannot be seen.
    """
    check_queries(provider, found)
    sizes = {site.head_size for site in found if site.head_size is not None}
    if len(sizes) > 1:
        raise InputError(f"Expected queries of one size in all layers, got {sorted(sizes)}: choose `stacks`.")
    return sizes.pop()


def check_queries(provider: str, sites: Iterable[SiteInfo], head_size: int | None = None) -> None:
    """Raise where a provider needs queries and the model shows none, as it writes its attention out.

    Args:
        provider: name of its class, for the message.
        sites: where it is to act.
        head_size: D, for which it was made.

    Raises:
        InputError: if so, or queries are of another size.
    """
    for site in sites:
        if not site.shows_queries:
            raise hidden_queries(provider, site.name)
        if head_size not in (None, site.head_size):
            raise InputError(
                f"Expected queries of size {head_size}, for which this {provider} was made, got {site.head_size} at "
                f"{site.name}: use `{provider}.for_model(model)`."
            )


def hidden_queries(provider: str, site: str) -> InputError:
    """What to say where a provider needs queries and the model shows none, as it writes its attention out."""
    return InputError(
        f"{provider} looks at queries, and {site} shows its scores alone: load the model with "
        "attn_implementation='sdpa', if it has that."
    )
