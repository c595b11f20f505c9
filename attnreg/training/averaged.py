"""Averages of weights: evaluate and keep an average of the networks that a training method passes through."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from attnreg.arguments import Probability, ProbabilityBelowOne, probability
from attnreg.errors import InputError
from attnreg.injection import detach, is_attached
from attnreg.training.method import Batch, StepResult, TrainingMethod


class Averaged(TrainingMethod):
    r"""Train by any method, and keep an average of its network's weights; or by several, and average over these, too.

    .. math:: \bar\theta_t = \beta\, \bar\theta_{t-1} + (1 - \beta)\, \theta_t, \qquad
              \theta = (1 - \alpha)\, \theta_0 + \alpha\, \bar\theta_t

    with the weights :math:`\theta_0` before training, and :math:`\bar\theta_1 = \theta_1`; of several methods,
    :math:`\theta_t` is the mean over their networks, a uniform soup. Averaging does not change the networks that train.
    Buffers and integer parameters are those of the latest network, of the first method.

    Args:
        method: the training method, new; or several, whose networks have the same weights and get the same batches.
        ema: decay :math:`\beta` of the moving average over steps; 0 keeps the latest weights.
        wise: share :math:`\alpha` of the trained weights; 1 keeps none of the weights before training.

    Raises:
        InputError: if a number is out of range, or the methods' networks do not have the same weights.

    Reference:
        WiSE-FT (Wortsman et al., CVPR 2022, arXiv 2109.01903), Section 3; model soups (Wortsman et al., ICML 2022,
        arXiv 2203.05482), Section 2.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from attnreg.training import FineTuning
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> before = model.classifier.weight.detach().clone()
        >>> method = Averaged(FineTuning(model, torch.optim.SGD(model.parameters(), lr=0.1)), wise=0.5)
        >>> result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        >>> torch.allclose(method.model.classifier.weight, (before + model.classifier.weight) / 2)
        True
    """

    def __init__(
        self,
        method: TrainingMethod | Sequence[TrainingMethod],
        *,
        ema: ProbabilityBelowOne = 0.0,
        wise: Probability = 1.0,
    ) -> None:
        self.methods = [method] if isinstance(method, TrainingMethod) else list(method)
        if len({id(member.model) for member in self.methods}) < max(1, len(self.methods)):
            raise InputError("Expected methods to average, with separate networks.")
        self.method = method = self.methods[0]
        self.ema = probability("ema", ema, "[0, 1)")
        self.wise = probability("wise", wise)
        self.provider, self.accelerator = method.provider, method.accelerator
        self.loss_function, self.micro_batches = method.loss_function, method.micro_batches
        self.max_grad_norm = method.max_grad_norm
        initial = _weights(method.model)
        for number, member in enumerate(self.methods[1:], 2):
            weights = _weights(member.model)
            if len(weights) != len(initial) or not all(map(torch.equal, weights, initial)):
                raise InputError(
                    f"Expected networks with the same weights before training, got others in method {number}: give "
                    "every method a copy of one network."
                )
        self._initial = self._latest() if self.wise < 1 else []
        self._average: list[Tensor] = []
        self._network = copy.deepcopy(method.model)
        if is_attached(self._network):
            detach(self._network)
        for name in ("forward", "_original_forward"):  # set by accelerate; it would run the network that trains
            vars(self._network).pop(name, None)
        if self.accelerator is not None:
            self._network = self.accelerator.prepare_model(self._network, evaluation_mode=True)
        self._is_current = True

    def _latest(self) -> list[Tensor]:
        """Return the mean weights of the training networks, in float32 or more: a bfloat16 mean would stand still."""
        return [
            torch.stack([weight.to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights]).mean(0)
            for weights in zip(*(_weights(method.model) for method in self.methods), strict=True)
        ]

    @property
    @override
    @torch.no_grad()
    def model(self) -> nn.Module:
        if not self._is_current:
            self._network.load_state_dict(self.method.model.state_dict())
            averages = self._average or (self._latest() if self._initial or len(self.methods) > 1 else [])
            for number, (weight, average) in enumerate(zip(_weights(self._network), averages, strict=False)):
                weight.copy_(average.lerp(self._initial[number], 1 - self.wise) if self._initial else average)
            self._is_current = True
        return self._network

    @property
    @override
    def networks(self) -> dict[str, nn.Module]:
        return {**self.method.networks, self.method.returned_name: self.model}

    @property
    @override
    def learners(self) -> list[nn.Module]:
        return [network for method in self.methods for network in method.learners]

    @override
    def step(self, batch: Batch) -> StepResult:
        result, *results = (method.step(batch) for method in self.methods)
        self._is_current = False
        if self.ema and self._average:
            get_ema_multi_avg_fn(self.ema)(self._average, self._latest(), None)
        elif self.ema:
            self._average = self._latest()
        if not results:
            return result
        return replace(result, loss=torch.stack([result.loss, *(other.loss for other in results)]).mean())

    @override
    def on_epoch(self, epoch: int) -> None:
        for method in self.methods:
            method.on_epoch(epoch)

    @override
    def drop_rates(self) -> dict[str, Tensor]:
        return self.method.drop_rates()

    @override
    def state_dict(self) -> dict[str, Any]:
        methods = [method.state_dict() for method in self.methods]
        return {"methods": methods, "before": self._initial, "average": self._average}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for method, method_state in zip(self.methods, state["methods"], strict=True):
            method.load_state_dict(method_state)
        devices = [weight.device for weight in _weights(self.method.model)]  # layers may be on several devices
        self._initial, self._average = (
            [weight.to(device, copy=True) for weight, device in zip(state[name], devices, strict=False)]
            for name in ("before", "average")
        )
        self._is_current = False


def _weights(network: nn.Module) -> list[Tensor]:
    """Return the floating-point parameters of a network, without gradients."""
    return [parameter.detach() for parameter in network.parameters() if parameter.is_floating_point()]
