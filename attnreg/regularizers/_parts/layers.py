"""Regularizers with parameters of their own for each layer of each stack, such as learned drop rates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo, functional
from attnreg.arguments import LARGEST_SIZE, inner_probability, one_of, whole_number
from attnreg.errors import InputError
from attnreg.injection import discover
from attnreg.injection.discovery.selection import choose
from attnreg.sites import Stack

Depth = int | Mapping[str, int]
Per = Literal["layer", "head"]

# Kept weights are divided by 1 - p. Half precision could not hold the result beyond this logit of p.
LARGEST_LOGIT = 8.0


class LayerwiseProvider(MaskProvider):
    """A regularizer with its own parameters for each layer of a model; layers are counted through all stacks."""

    #: The constructor's arguments that follow from the model; :meth:`measure` gives them.
    measured: ClassVar[Sequence[str]] = ("num_layers",)

    def __init__(self, num_layers: Depth) -> None:
        super().__init__()
        self.num_layers = num_layers
        self._depth = dict(num_layers) if isinstance(num_layers, Mapping) else {"": num_layers}
        if not self._depth:
            raise InputError(f"Expected `num_layers` to be at least 1 in each stack, got {num_layers!r}.")
        self._layers = sum(whole_number("num_layers", layers) for layers in self._depth.values())

    def _number_of(self, site: SiteInfo) -> int:
        """Return the number of a site's layer."""
        begin = 0
        for stack, layers in self._depth.items():
            if stack in ("", site.stack) and site.layer < layers:
                return begin + site.layer
            begin += layers
        raise self._other_depth({site.stack: site.num_layers})

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        found = _depth_of(sites)
        single = "" in self._depth and len(found) == 1
        if any(self._depth.get("" if single else stack) != layers for stack, layers in found.items()):
            raise self._other_depth(found)

    def _other_depth(self, found: Mapping[Any, int]) -> InputError:
        made, got = (
            ", ".join(f"{layers} {stack} layers".replace("  ", " ") for stack, layers in depth.items())
            for depth in (self._depth, found)
        )
        return self._misfit(made, f"the model has {got}")

    def _misfit(self, made_for: str, found: str) -> InputError:
        name = type(self).__name__
        return InputError(f"This {name} was made for {made_for}, but {found}: use `{name}.for_model(model)`.")

    @classmethod
    def measure(cls, sites: Sequence[SiteInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of ``measured``, from the sites and the other arguments."""
        return {name: MEASURES[name](sites, cls.__name__) for name in cls.measured}

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        *args: Any,
        stacks: Sequence[Stack] | None = None,
        example_inputs: Any = None,
        **options: Any,
    ) -> Self:
        """Make a regularizer for the layers of a model, on the model's device.

        Args:
            model: any model that the regularizer can be attached to.
            args: the constructor's arguments, without those that describe the model (``measured``).
            stacks: as in :func:`attnreg.attach`.
            example_inputs: as in :func:`attnreg.attach`.
            options: more of the constructor's arguments, by name.

        Raises:
            InputError: if the model has no attention in these stacks, or its layers differ in what is needed.
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


class LearnedRates(LayerwiseProvider):
    """A regularizer with a learned drop rate per layer or head of each layer."""

    measured = ("num_layers", "num_heads")

    def __init__(self, num_layers: Depth, p: float, per: Per, num_heads: int | None) -> None:
        super().__init__(num_layers)
        p = inner_probability("p", p)
        if one_of("per", per, get_args(Per)) == "head":
            if num_heads is None or num_heads < 1:
                raise InputError(f"Expected `num_heads` to be at least 1 for rates per head, got {num_heads}.")
            whole_number("num_heads", num_heads)
        shape = self._layers, num_heads or 1 if per == "head" else 1
        self.logits = nn.Parameter(torch.full(shape, math.log(p / (1 - p))))  # of dropping
        self.p = p
        self.per = per
        self.num_heads = num_heads

    @classmethod
    @override
    def measure(cls, sites: Sequence[SiteInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        by_head = options.get("per") == "head"
        return super().measure(sites, options) if by_head else {"num_layers": _depth_of(sites), "num_heads": None}

    @property
    def rates(self) -> Tensor:
        """The current drop rates, without gradients."""
        return self.logits.detach().sigmoid()

    def _logits_at(self, site: AttentionSite) -> Tensor:
        """Return the logits of one site, broadcastable to ``(B, H, Q, K)``."""
        if self.logits.shape[1] not in (1, site.shape[1]):
            raise self._misfit(f"{self.logits.shape[1]} heads", f"{site.name} has {site.shape[1]}")
        return self.logits[self._number_of(site)].to(site.device).clamp(max=LARGEST_LOGIT).view(-1, 1, 1)


class SeesQueries(LayerwiseProvider):
    """A regularizer that reads queries, and keeps those of a forward pass, by layer, for its penalty."""

    draws_in_prepare = False  # `prepare` only forgets the latest pass

    def __init__(self, num_layers: Depth, head_size: int) -> None:
        super().__init__(num_layers)
        self.head_size = whole_number("head_size", head_size, most=LARGEST_SIZE)
        self._seen: dict[int, Any] = {}

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        super().check(sites, model)
        for site in sites:
            if not site.shows_queries:
                raise _hidden_queries(type(self).__name__, site.name)
            if site.head_size != self.head_size:
                raise self._misfit(f"queries of size {self.head_size}", f"{site.name} has size {site.head_size}")

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        self._seen = {}

    @override
    def step(self) -> None:
        self._seen = {}

    def _queries_of(self, site: AttentionSite, heads: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a site's queries and keys, both ``(B, H, ..., D)``, without gradients; ``heads`` is the expected H."""
        if site.query is None or site.key is None:
            raise _hidden_queries(type(self).__name__, site.name)
        got = site.query.shape[1], site.query.shape[-1]
        expected = got[0] if heads is None else heads, self.head_size
        if got != expected:
            made = f"{expected[0]} heads of size {expected[1]}"
            raise self._misfit(made, f"{site.name} has {got[0]} of size {got[1]}")
        query, key = site.query.detach(), site.key.detach()
        if key.shape[1] != query.shape[1]:  # grouped-query attention
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return query, key


def relaxed_mask(site: AttentionSite, logits: Tensor, temperature: float) -> Mask:
    """Return relaxed decisions by the logits of dropping; kept weights are divided by the probability of keeping."""
    drop = functional.concrete_drop(logits, site.uniform(dtype=logits.dtype), temperature)
    return Mask(weights=(1 - drop) / torch.sigmoid(-logits), kept=drop < 0.5)


def _depth_of(sites: Sequence[SiteInfo], provider: str = "") -> dict[str, int]:
    """Return the number of layers of each stack."""
    return {str(site.stack): site.num_layers for site in sites}


def _heads_of(sites: Sequence[SiteInfo], provider: str) -> int:
    heads = {site.heads for site in sites}
    if len(heads) > 1 or None in heads:
        raise InputError(
            f"The number of heads is not the same in all layers, but {sorted(heads, key=str)}: choose `stacks`."
        )
    return heads.pop()  # type: ignore[return-value]


def _head_size_of(sites: Sequence[SiteInfo], provider: str) -> int:
    if hidden := [site.name for site in sites if site.head_size is None]:
        raise _hidden_queries(provider, hidden[0])
    sizes = {site.head_size for site in sites if site.head_size is not None}
    if len(sizes) > 1:
        raise InputError(f"The size of queries is not the same in all layers, but {sorted(sizes)}: choose `stacks`.")
    return sizes.pop()


def _hidden_queries(provider: str, site: str) -> InputError:
    """Make the error for a model that computes its attention step by step, so that its queries cannot be read."""
    return InputError(
        f"{provider} needs queries, but {site} exposes only its scores: load the model with "
        "attn_implementation='sdpa', if it supports that."
    )


#: What follows from a model, by the name of the argument.
MEASURES: dict[str, Callable[[Sequence[SiteInfo], str], Any]] = {
    "num_layers": _depth_of,
    "num_heads": _heads_of,
    "head_size": _head_size_of,
}
