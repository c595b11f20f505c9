"""Regularizers with parameters of their own for each layer of each stack, such as learned drop rates."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from attnreg.arguments import inner_probability, one_of, whole_number
from attnreg.errors import InputError
from attnreg.injection import discover
from attnreg.injection.discovery.selection import choose
from attnreg.regularizer.providers import MaskProvider
from attnreg.sites import AttentionSite, SiteInfo, Stack

Depth = int | Mapping[str, int]
Per = Literal["layer", "head"]

# Kept weights are divided by 1 - p. Half precision could not hold the result beyond this logit of p.
LARGEST_LOGIT = 8.0


class LayerIndex:
    """Numbers the layers of all stacks, one stack after the other; messages name the regularizer."""

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
        return misfit(self.provider, f"made for {made}, but the model has {got}")


class LayerwiseProvider(MaskProvider):
    """A regularizer with its own parameters for each layer of a model."""

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
        shape = len(self._index), num_heads or 1 if per == "head" else 1
        self.logits = nn.Parameter(torch.full(shape, math.log(p / (1 - p))))  # of dropping
        self.p = p
        self.per = per
        self.num_heads = num_heads

    @classmethod
    @override
    def measure(cls, sites: Sequence[SiteInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        return {"num_layers": depth_of(sites), "num_heads": heads_of(sites) if options.get("per") == "head" else None}

    @property
    def rates(self) -> Tensor:
        """The current drop rates, without gradients."""
        return self.logits.detach().sigmoid()

    def _logits_at(self, site: AttentionSite) -> Tensor:
        """Return the logits of one site, broadcastable to ``(B, H, Q, K)``."""
        if self.logits.shape[1] not in (1, site.shape[1]):
            made = f"made for {self.logits.shape[1]} heads"
            raise misfit(type(self).__name__, f"{made}, but {site.name} has {site.shape[1]}")
        return self.logits[self._index(site)].to(site.device).clamp(max=LARGEST_LOGIT).view(-1, 1, 1)


def misfit(regularizer: str, why: str) -> InputError:
    """Make the error for a regularizer that was made for another model."""
    return InputError(f"This {regularizer} was {why}: use `{regularizer}.for_model(model)`.")


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
