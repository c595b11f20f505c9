"""Which parameters of a learning provider belong to a site: it has some for each layer of each stack."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from typing_extensions import override

from attnreg.arguments import whole_number
from attnreg.errors import InputError
from attnreg.injection import discover
from attnreg.injection.discovery.selection import choose
from attnreg.regularizer.providers import MaskProvider
from attnreg.sites import SiteInfo, Stack

Depth = int | Mapping[str, int]
Made = TypeVar("Made", bound="LayerwiseProvider")


class LayerIndex:
    """Numbers the layers of all stacks, one stack after the other; messages name the provider.

    Example:
        >>> index = LayerIndex("ConcreteDropout", {"encoder": 2, "decoder": 3})
        >>> len(index), index(SiteInfo(stack="decoder", layer=1, num_layers=3))
        (5, 3)
    """

    def __init__(self, provider: str, num_layers: Depth) -> None:
        self.provider = provider
        self.depth = dict(num_layers) if isinstance(num_layers, Mapping) else {"": num_layers}
        if not self.depth:
            raise InputError(f"Expected `num_layers` to be at least 1 in each stack, got {num_layers!r}.")
        for layers in self.depth.values():
            whole_number("num_layers", layers)

    def __len__(self) -> int:
        return sum(self.depth.values())

    def __call__(self, site: SiteInfo) -> int:
        """Return the number of a site's layer."""
        begin = 0
        for stack, layers in self.depth.items():
            if stack in ("", site.stack) and site.layer < layers:
                return begin + site.layer
            begin += layers
        raise self._misfit({site.stack: site.num_layers})

    def check(self, sites: Iterable[SiteInfo]) -> None:
        """Raise if a stack of the sites has another number of layers."""
        found = {site.stack: site.num_layers for site in sites}
        single = "" in self.depth and len(found) == 1
        if any(self.depth.get("" if single else stack) != layers for stack, layers in found.items()):
            raise self._misfit(found)

    def _misfit(self, found: Mapping[Any, int]) -> InputError:
        made = ", ".join(f"{layers} {stack} layers".replace("  ", " ") for stack, layers in self.depth.items())
        got = ", ".join(f"{layers} {stack} layers" for stack, layers in found.items())
        return InputError(
            f"This {self.provider} was made for {made}, but the model has {got}: use "
            f"`{self.provider}.for_model(model)`."
        )


class LayerwiseProvider(MaskProvider):
    """A provider with its own parameters for each layer of a model."""

    #: The constructor's arguments that follow from the model; :meth:`measure` gives them.
    measured: ClassVar[Sequence[str]] = ("num_layers",)

    def __init__(self, num_layers: Depth) -> None:
        super().__init__()
        self._index = LayerIndex(type(self).__name__, num_layers)
        self.num_layers = num_layers

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        self._index.check(sites)

    @classmethod
    @abstractmethod
    def measure(cls, sites: Sequence[SiteInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of ``measured``, from the sites and the other arguments."""

    @classmethod
    def for_model(
        cls: type[Made],
        model: nn.Module,
        *args: Any,
        stacks: Sequence[Stack] | None = None,
        example_inputs: Any = None,
        **options: Any,
    ) -> Made:
        """Make a provider for the layers of a model, on the model's device.

        Args:
            model: any model that the provider can be attached to.
            args: the constructor's arguments, without those that describe the model (``measured``).
            stacks: as in :func:`attnreg.attach`.
            example_inputs: as in :func:`attnreg.attach`.
            options: more of the constructor's arguments, by name.

        Raises:
            InputError: if the model has no attention in these stacks, or its layers differ in what the provider needs.
            NoAttentionError: if no attention is found in the model.

        Example:
            >>> from attnreg import ConcreteDropout
            >>> from transformers import BertConfig, BertModel
            >>> config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=3, num_attention_heads=2)
            >>> ConcreteDropout.for_model(BertModel(config), p=0.5, per="head").rates.shape
            torch.Size([3, 2])
        """
        free = [p for name, p in inspect.signature(cls).parameters.items() if name not in cls.measured]
        given = inspect.Signature(free).bind_partial(*args, **options).arguments
        sites = [site.info for site in choose(discover(model, example_inputs), stacks=stacks)]
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return cls(**cls.measure(sites, given), **given).to(device)


def depth_of(found: Sequence[SiteInfo]) -> dict[str, int]:
    """Return the number of layers of each stack."""
    return {str(site.stack): site.num_layers for site in found}


def heads_of(found: Sequence[SiteInfo]) -> int:
    """Return the number of heads of all sites, or raise if they differ."""
    heads = {site.heads for site in found}
    if len(heads) > 1 or None in heads:
        raise InputError(
            f"The number of heads is not the same in all layers, but {sorted(heads, key=str)}: choose `stacks`."
        )
    return heads.pop()  # type: ignore[return-value]


def head_size_of(found: Sequence[SiteInfo], provider: str) -> int:
    """Return D, the size of the query vectors of all sites, or raise if they differ or are not exposed."""
    check_queries(provider, found)
    sizes = {site.head_size for site in found if site.head_size is not None}
    if len(sizes) > 1:
        raise InputError(f"The size of queries is not the same in all layers, but {sorted(sizes)}: choose `stacks`.")
    return sizes.pop()


def check_queries(provider: str, sites: Iterable[SiteInfo], head_size: int | None = None) -> None:
    """Raise if a site exposes only scores, or its queries have another size than ``head_size`` (``None``: any)."""
    for site in sites:
        if not site.shows_queries:
            raise hidden_queries(provider, site.name)
        if head_size not in (None, site.head_size):
            raise InputError(
                f"This {provider} was made for queries of size {head_size}, but {site.name} has size "
                f"{site.head_size}: use `{provider}.for_model(model)`."
            )


def hidden_queries(provider: str, site: str) -> InputError:
    """Make the error for a model that computes its attention step by step, so that its queries cannot be read."""
    return InputError(
        f"{provider} needs queries, but {site} exposes only its scores: load the model with "
        "attn_implementation='sdpa', if it supports that."
    )
