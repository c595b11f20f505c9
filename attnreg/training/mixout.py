"""Mixout: replace random weights by their pretrained values in every forward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from attnreg.arguments import ProbabilityBelowOne, probability
from attnreg.errors import InputError
from attnreg.training.fine_tuning import FineTuning, Provided, Shared
from attnreg.training.levels import base_of
from attnreg.training.linear import check_free, use_own_weights, use_weights
from attnreg.training.method import Batch, StepResult


def mix(weight: Tensor, pretrained: Tensor, replaced: Tensor, p: float) -> Tensor:
    """Replace parts of a weight by their pretrained values and rescale, so that the expected weight is unchanged."""
    return (torch.where(replaced, pretrained, weight) - p * pretrained) / (1 - p)


class Mixout(FineTuning):
    r"""Fine-tune while random input neurons of linear layers use their pretrained weights.

    .. math:: \tilde W_{oi} = \big( M_i U_{oi} + (1 - M_i) W_{oi} - p\, U_{oi} \big) / (1 - p), \qquad
        M_i \sim \mathrm{Bernoulli}(p)

    U are the weights when the method is created. M is drawn per layer and forward pass in training mode.

    It applies to the weights (not the biases) of all ``nn.Linear`` layers in ``model.base_model``, which excludes a new
    head, or of the whole model if it has none. The ``state_dict`` keys do not change. The model's dropout stays on,
    whereas the paper replaces it.

    Args:
        model, optimizer, provider: as in :class:`FineTuning`; the model is pretrained.
        p: probability that an input neuron of a linear layer uses its pretrained weights, below 1.
        shared: further arguments of :class:`FineTuning`. The micro-batches of a step share M.

    Raises:
        InputError: if ``p`` is out of range, or the model has no suitable linear layer.

    Reference:
        Mixout (ICLR 2020, arXiv 1909.11299). The authors' code omits the factor :math:`1 / (1 - p)` in the gradient.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> method = Mixout(model, torch.optim.SGD(model.parameters(), lr=0.1), p=0.5)
        >>> result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        >>> list(method.pretrained)[:2]
        ['bert.encoder.layer.0.attention.self.query', 'bert.encoder.layer.0.attention.self.key']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: Provided = None,
        *,
        p: ProbabilityBelowOne = 0.7,
        **shared: Unpack[Shared],
    ) -> None:
        self.p = probability("p", p, "[0, 1)")
        if shared.get("objective") is not None and shared.get("micro_batches", 1) > 1:
            raise InputError(
                "Mixout mixes the weights of every pass anew, but all micro-batches alike, which an objective of "
                "several passes does not fit: use `micro_batches=1`."
            )
        self._layers = _layers(model)
        super().__init__(model, optimizer, provider, **shared)
        # Copied after the accelerator has moved the model to its device.
        self.pretrained = {name: layer.weight.detach().clone() for name, layer in self._layers.items()}
        self._masks: dict[str, Tensor] = {}  # the masks M that all micro-batches of a step share
        for name, layer in self._layers.items():
            mixed = functools.partial(_mixed, pretrained=self.pretrained[name], p=p, masks=self._masks, name=name)
            use_weights(layer, mixed)

    @override
    def step(self, batch: Batch) -> StepResult:
        if self.micro_batches > 1:
            self._masks.update({name: _draw_mask(layer, self.p) for name, layer in self._layers.items()})
        try:
            return super().step(batch)
        finally:
            self._masks.clear()

    def detach(self) -> None:
        """Restore the model's forward passes. Calling it twice is fine."""
        use_own_weights(self._layers.values())
        self._layers = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pretrained": dict(self.pretrained)}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, weight in self.pretrained.items():
            weight.copy_(state["pretrained"][name])


def _layers(model: nn.Module) -> dict[str, nn.Linear]:
    if hasattr(model, "peft_config"):
        raise InputError("Mixout mixes pretrained weights, which adapters do not train: fine-tune the model itself.")
    base = base_of(model)
    modules = set(base.modules())
    # Not subclasses: they override forward, or another module reads their weights (nn.MultiheadAttention).
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m in modules}
    trainable = {name: layer for name, layer in layers.items() if layer.weight.requires_grad}
    if not trainable:
        raise InputError(f"{type(base).__name__} has no trainable nn.Linear layer, so Mixout has nothing to mix.")
    check_free(trainable, "Mixout")
    return trainable


def _mixed(layer: nn.Linear, *, pretrained: Tensor, p: float, masks: Mapping[str, Tensor], name: str) -> Tensor:
    return mix(layer.weight, pretrained, masks[name] if masks else _draw_mask(layer, p), p)


def _draw_mask(layer: nn.Linear, p: float) -> Tensor:
    # From torch's global generator, because gradient checkpointing replays it.
    return torch.rand(layer.in_features, device=layer.weight.device) < p
