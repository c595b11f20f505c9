"""Regularizers with separate parameters per layer of every stack, such as learned drop rates."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo, functional
from attnreg.arguments import whole_number
from attnreg.errors import InputError
from attnreg.injection import discover
from attnreg.injection.discovery.selection import choose
from attnreg.sites import Stack

Depth = int | Mapping[str, int]

# Kept weights are divided by 1 - p. Half precision could not hold the result beyond this logit of p.
LARGEST_LOGIT = 8.0


class LayerwiseProvider(MaskProvider):
    """A regularizer with separate parameters per layer of a model; layers are counted through all stacks."""

    #: The constructor's arguments that follow from the model; :meth:`measure` returns their values.
    measured: ClassVar[Sequence[str]] = ("num_layers",)

    def __init__(self, num_layers: Depth) -> None:
        super().__init__()
        if num_layers == 0:
            name = type(self).__name__
            raise InputError(f"{name} needs sizes of the model, such as `num_layers`: use `{name}.for_model(model)`.")
        self.num_layers = num_layers
        self._depth = dict(num_layers) if isinstance(num_layers, Mapping) else {"": num_layers}
        if not self._depth:
            raise InputError(f"Expected `num_layers` to be at least 1 in each stack, got {num_layers!r}.")
        self._total_layers = sum(whole_number("num_layers", layers) for layers in self._depth.values())

    def _layer_index(self, site: SiteInfo) -> int:
        """Return the index of a site's layer among the layers of all stacks."""
        first = 0
        for stack, layers in self._depth.items():
            if stack in ("", site.stack) and site.layer < layers:
                return first + site.layer
            first += layers
        raise self._depth_error({site.stack: site.num_layers})

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        depth = depth_of(sites)
        single = "" in self._depth and len(depth) == 1
        if any(self._depth.get("" if single else stack) != layers for stack, layers in depth.items()):
            raise self._depth_error(depth)

    def _depth_error(self, depth: Mapping[Any, int]) -> InputError:
        expected, actual = (
            ", ".join(f"{layers} {stack} layers".replace("  ", " ") for stack, layers in layers_of.items())
            for layers_of in (self._depth, depth)
        )
        return self._size_error(expected, f"the model has {actual}")

    def _size_error(self, expected: str, actual: str) -> InputError:
        name = type(self).__name__
        return InputError(f"This {name} was made for {expected}, but {actual}: use `{name}.for_model(model)`.")

    @classmethod
    def measure(cls, sites: Sequence[SiteInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of ``measured``, from the sites and the other arguments."""
        sizes: dict[str, Any] = {"num_layers": depth_of(sites)}
        for name, attribute in (("head_size", "head_size"), ("num_heads", "heads")):
            if name in cls.measured:
                values = {getattr(site, attribute): site.name for site in sites}
                if name == "head_size" and None in values:
                    raise hidden_queries(cls.__name__, values[None])
                if len(values) > 1 or None in values:
                    size = "number of heads" if name == "num_heads" else "size of queries"
                    raise InputError(
                        f"The {size} is not the same in all layers, but {sorted(values, key=str)}: choose `stacks`."
                    )
                sizes[name] = next(iter(values))
        return sizes

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
            args: the constructor's arguments, without the arguments that describe the model (``measured``).
            stacks: as in :func:`attnreg.attach`.
            example_inputs: as in :func:`attnreg.attach`.
            options: further arguments of the constructor, by name.

        Raises:
            InputError: if the model has no attention in these stacks, or its layers differ in a size that is needed.
            NoAttentionError: if the model has no attention that attnreg knows.

        Example:
            >>> from attnreg import ConcreteDropout
            >>> from transformers import BertConfig, BertModel
            >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2))
            >>> ConcreteDropout.for_model(model, p=0.5, per="head").rates.shape
            torch.Size([3, 2])
        """
        parameters = [p for name, p in inspect.signature(cls).parameters.items() if name not in cls.measured]
        arguments = inspect.Signature(parameters).bind_partial(*args, **options).arguments
        sites = [site.info for site in choose(discover(model, example_inputs), stacks=stacks)]
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return cls(**cls.measure(sites, arguments), **arguments).to(device)


def relaxed_mask(site: AttentionSite, logits: Tensor, temperature: float) -> Mask:
    """Return relaxed decisions from logits of dropping; kept weights are divided by the probability of keeping."""
    drop = functional.concrete_drop(logits, site.uniform(dtype=logits.dtype), temperature)
    return Mask(weights=(1 - drop) / torch.sigmoid(-logits), kept=drop < 0.5)


def depth_of(sites: Sequence[SiteInfo]) -> dict[str, int]:
    """Return the number of layers of each stack."""
    return {str(site.stack): site.num_layers for site in sites}


def hidden_queries(provider: str, site: str) -> InputError:
    """Return the error for a model that computes attention step by step, so that its queries cannot be read."""
    return InputError(
        f"{provider} needs queries, but {site} exposes only its scores: load the model with "
        "attn_implementation='sdpa', if it supports that."
    )
