"""LoRA Dropout and rank dropout: drop rows and columns of the matrices of adapters."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from attnreg.arguments import ProbabilityBelowOne, probability
from attnreg.errors import InputError
from attnreg.training.linear import check_free, use_own_weights, use_weights

Rates: TypeAlias = ProbabilityBelowOne | Mapping[str, ProbabilityBelowOne]


class LoRADropout:
    r"""Drop input features, output features and ranks of a model's LoRA adapters, in training mode.

    .. math:: \Delta W = \frac{\alpha}{r}\, D_{out}\, B\, D_{rank}\, A\, D_{in}, \qquad
        D = \mathrm{diag}(m) / (1 - p), \quad m_i \sim \mathrm{Bernoulli}(1 - p)

    The matrix :math:`D_{rank}` has the rate ``ranks``, the two others p. All tokens and samples of a pass share m,
    adapters do not; peft's ``lora_dropout``, in contrast, drops the values of a token, which enter A.

    It acts on all adapters of peft that the model has now, in linear layers, quantized or not; on one adapter while it
    trains, so that ``set_adapter`` may choose another. Parameters and ``state_dict`` keys do not change. Numbers
    come from torch's generator: checkpoints repeat them with ``preserve_rng_state=True``, or :func:`attnreg.seeded`.

    Args:
        model: a model of peft, or any model with its LoRA layers.
        p: rate at which columns of A and rows of B are dropped (LoRA Dropout). A mapping has a rate per pattern of
            module names, as peft's ``rank_pattern``: a regular expression for the end of the name, from a dot on, such
            as ``{r"0\..*query": 0.5, "value": 0.1}``. The first match counts; other modules have rate 0.
        ranks: rate at which rows of A are dropped, which multiply columns of B (rank dropout), or such a mapping.

    Raises:
        InputError: if a rate is out of range, a pattern gives no adapter its rate, the model has no trainable adapter,
            or one of another kind: of embeddings, convolutions or ``nn.MultiheadAttention``, DoRA, or merged.

    Reference:
        LoRA Dropout (arXiv 2404.09610), whose ensemble of dropped models at test time is not here. DropLoRA
        (arXiv 2508.17337) drops ranks; the authors' code drops them per token by itself.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> model = get_peft_model(nn.Sequential(nn.Linear(8, 8)), LoraConfig(r=4, target_modules=["0"]))
        >>> dropout = LoRADropout(model, p=0.5, ranks=0.25)
        >>> list(dropout.adapters)
        ['base_model.model.0.default']
    """

    def __init__(self, model: nn.Module, p: Rates = 0.5, ranks: Rates = 0.0) -> None:
        self.p, self.ranks = p, ranks
        #: The matrices A and B of an adapter, by its name.
        self.adapters: dict[str, tuple[nn.Linear, nn.Linear]] = dict(_adapters(model))
        if not any(a.weight.requires_grad for a, _ in self.adapters.values()):
            raise InputError(f"{type(model).__name__} has no LoRA adapter that trains: call `peft.get_peft_model`.")
        for side in (0, 1):
            check_free({name: pair[side] for name, pair in self.adapters.items()}, "LoRADropout")
        feature_rates, rank_rates = _rates("p", p, self.adapters), _rates("ranks", ranks, self.adapters)
        for name, (a, b) in self.adapters.items():
            use_weights(a, functools.partial(_dropped, rows=rank_rates[name], columns=feature_rates[name]))
            use_weights(b, functools.partial(_dropped, rows=feature_rates[name], columns=0.0))

    def detach(self) -> None:
        """Restore the adapters' forward passes. Calling it twice is fine."""
        use_own_weights(layer for pair in self.adapters.values() for layer in pair)


def _rates(argument: str, rates: Rates, adapters: Mapping[str, tuple[nn.Linear, nn.Linear]]) -> dict[str, float]:
    """Return the rates of adapters; raise if a rate is out of range, or a pattern gives no trained adapter its rate."""
    chosen: dict[str, float] = {}
    for pattern, rate in (rates if isinstance(rates, Mapping) else {".*": rates}).items():
        probability(f"{argument}[{pattern!r}]" if isinstance(rates, Mapping) else argument, rate, "[0, 1)")
        try:
            matches = re.compile(rf"(.*\.)?({pattern})\.[^.]+").fullmatch  # the adapter's name follows the module's
        except re.error as error:
            raise InputError(f"Pattern {pattern!r} of `{argument}` is no regular expression: {error}.") from None
        matching = [name for name in adapters if name not in chosen and matches(name)]
        if not any(adapters[name][0].weight.requires_grad for name in matching):
            raise InputError(
                f"Pattern {pattern!r} of `{argument}` gives no adapter its rate: the names of their modules, such as "
                f"{next(iter(adapters)).rpartition('.')[0]}, do not end in it, or an earlier pattern matches them."
            )
        chosen.update(dict.fromkeys(matching, rate))
    return {name: chosen.get(name, 0.0) for name in adapters}


def _adapters(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Linear, nn.Linear]]]:
    for name, layer in model.named_modules():
        matrices = getattr(layer, "lora_A", None)
        if not isinstance(matrices, (nn.ModuleDict, nn.ParameterDict)):
            continue
        if len(getattr(layer, "lora_embedding_A", ())):
            raise _unsupported(name, "an adapter of embeddings")
        for adapter, a in matrices.items():
            b = layer.lora_B[adapter]
            # The layers of peft with such a name run A and B as modules, once in a pass.
            if "Linear" not in type(layer).__name__ or type(a) is not nn.Linear or type(b) is not nn.Linear:
                raise _unsupported(name, f"an adapter of {type(layer).__name__}")
            if adapter in getattr(layer, "lora_variant", {}) or getattr(layer, "use_dora", {}).get(adapter):
                raise _unsupported(name, "a variant of LoRA, such as DoRA")
            if layer.merged:
                raise _unsupported(name, "one merged into the weights")
            yield f"{name}.{adapter}", (a, b)


def _unsupported(name: str, kind: str) -> InputError:
    return InputError(f"LoRADropout drops features of plain adapters of linear layers, but {name} has {kind}.")


def _dropped(layer: nn.Linear, *, rows: float, columns: float) -> Tensor:
    weight: Tensor = layer.weight
    for dim, p in enumerate((rows, columns)):
        if p and layer.weight.requires_grad:  # another adapter may train
            # From torch's global generator, because gradient checkpointing replays it.
            keep = torch.rand(weight.shape[dim], device=weight.device) >= p
            weight = weight * (keep.to(weight.dtype) / (1 - p)).unsqueeze(1 - dim)
    return weight
