"""Averages of weights: evaluate and keep an average of the networks that a training method passes through."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from attnreg.arguments import Probability, ProbabilityBelowOne, probability, probability_below_one
from attnreg.injection import detach, is_attached
from attnreg.training.method import Batch, StepResult, TrainingMethod


class Averaged(TrainingMethod):
    r"""Train by any method, and keep an average of its network's weights.

    .. math:: \bar\theta_t = \beta\, \bar\theta_{t-1} + (1 - \beta)\, \theta_t, \qquad
              \theta = (1 - \alpha)\, \theta_0 + \alpha\, \bar\theta_t

    with the weights :math:`\theta_0` before training, and :math:`\bar\theta_1 = \theta_1`. The network that trains is
    not changed by it. Buffers, and numbers that are no floating-point numbers, are those of the latest network.

    Args:
        method: the training method, new.
        ema: decay :math:`\beta` of the moving average over steps; 0 keeps the latest weights.
        wise: share :math:`\alpha` of the trained weights; 1 keeps none of the weights before training.

    Raises:
        InputError: if a number is out of range.

    Reference:
        WiSE-FT (Wortsman et al., CVPR 2022, arXiv 2109.01903), Section 3, for :math:`\alpha`.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from attnreg.training import FineTuning
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> before = model.classifier.weight.detach().clone()
        >>> method = Averaged(FineTuning(model, torch.optim.SGD(model.parameters(), lr=0.1)), wise=0.5)
        >>> result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        >>> torch.allclose(method.model.classifier.weight, (before + model.classifier.weight) / 2)
        True
    """

    def __init__(self, method: TrainingMethod, *, ema: ProbabilityBelowOne = 0.0, wise: Probability = 1.0) -> None:
        self.method = method
        self.ema = probability_below_one("ema", ema)
        self.wise = probability("wise", wise)
        self.provider, self.accelerator = method.provider, method.accelerator
        self.loss_function, self.micro_batches = method.loss_function, method.micro_batches
        self.max_grad_norm = method.max_grad_norm
        self._before = self._latest() if self.wise < 1 else []
        self._average: list[Tensor] = []
        self._network = copy.deepcopy(method.model)
        if is_attached(self._network):
            detach(self._network)
        for name in ("forward", "_original_forward"):  # of accelerate, which would run the network that trains
            vars(self._network).pop(name, None)
        if self.accelerator is not None:
            self._network = self.accelerator.prepare_model(self._network, evaluation_mode=True)
        self._is_current = True

    def _latest(self) -> list[Tensor]:
        """Copy the weights that train, in float32 or more: in bfloat16, an average would stand still."""
        trained = [each.detach() for each in self.method.model.parameters() if each.is_floating_point()]
        return [each.to(torch.promote_types(each.dtype, torch.float32), copy=True) for each in trained]

    @property
    @override
    @torch.no_grad()
    def model(self) -> nn.Module:
        if not self._is_current:
            self._network.load_state_dict(self.method.model.state_dict())
            for number, kept in enumerate(p for p in self._network.parameters() if p.is_floating_point()):
                exact = torch.promote_types(kept.dtype, torch.float32)
                average = self._average[number] if self._average else kept.to(exact)
                kept.copy_(average.lerp(self._before[number], 1 - self.wise) if self._before else average)
            self._is_current = True
        return self._network

    @property
    @override
    def networks(self) -> dict[str, nn.Module]:
        return {**self.method.networks, self.method.returned_name: self.model}

    @property
    @override
    def learners(self) -> list[nn.Module]:
        return self.method.learners

    @override
    def step(self, batch: Batch) -> StepResult:
        result = self.method.step(batch)
        self._is_current = False
        if self.ema and self._average:
            get_ema_multi_avg_fn(self.ema)(self._average, self._latest(), None)
        elif self.ema:
            self._average = self._latest()
        return result

    @override
    def on_epoch(self, epoch: int) -> None:
        self.method.on_epoch(epoch)

    @override
    def drop_rates(self, *, by_head: bool = False) -> dict[str, Tensor]:
        return self.method.drop_rates(by_head=by_head)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"method": self.method.state_dict(), "before": self._before, "average": self._average}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.method.load_state_dict(state["method"])
        device = next(self._network.parameters()).device
        self._before, self._average = ([each.to(device) for each in state[name]] for name in ("before", "average"))
        self._is_current = False
