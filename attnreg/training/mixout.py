"""Mixout: parts of the weights are the pretrained ones again, others in each forward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from attnreg.arguments import ProbabilityBelowOne, probability_below_one
from attnreg.errors import InputError
from attnreg.injection import AttachHandle
from attnreg.provider.base import MaskProvider
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import Shared


def mix(weight: Tensor, pretrained: Tensor, replaced: Tensor, p: float) -> Tensor:
    r"""Replace parts of a weight by their pretrained values, so that its mean stays what it is.

    .. math:: \big( M \odot u + (1 - M) \odot w - p\, u \big) / (1 - p), \qquad M \sim \mathrm{Bernoulli}(p)

    Args:
        weight: w, the current values.
        pretrained: u.
        replaced: M, bool, broadcastable to them, ``True`` = pretrained.
        p: its probability, below 1.

    Example:
        >>> mix(torch.tensor([3.0, 3.0]), torch.tensor([1.0, 1.0]), torch.tensor([True, False]), p=0.5)
        tensor([1., 5.])
    """
    return (torch.where(replaced, pretrained, weight) - p * pretrained) / (1 - p)


class Mixout(FineTuning):
    r"""Fine-tuning in which a share p of the neurons that go into each linear layer has its pretrained weights.

    .. math:: \tilde W_{oi} = \big( M_i U_{oi} + (1 - M_i) W_{oi} - p\, U_{oi} \big) / (1 - p), \qquad
        M_i \sim \mathrm{Bernoulli}(p)

    with U what the weights are when the method is made; M is drawn for each layer and forward pass, in training mode
    alone. It draws W towards U the more strongly, the larger p.

    Mixed are the weights (not the biases) of the ``nn.Linear`` within ``model.base_model``, so that a new head, which
    has no pretrained values, is left alone; in a model without one, all of them. The model keeps its ``state_dict``
    keys; U is held once beside it. The model's own dropout stays; the paper puts mixout in its place.

    Args:
        model: a pretrained model whose output has a ``loss`` when it is given ``labels``.
        optimizer: over the model's parameters, and the provider's if it learns by the same loss.
        provider: attached to every self-attention of the model; to choose layers, attach it yourself and pass the
            handle instead.
        p: probability of the pretrained value, below 1.
        shared: ``scheduler``, ``max_grad_norm`` and ``accelerator``, as :class:`FineTuning` takes them.

    Raises:
        ValueError: if ``p`` is out of range, or the model has no linear layer that could be mixed.

    Reference:
        Mixout (ICLR 2020, arXiv 1909.11299). Its code leaves the factor :math:`1 / (1 - p)` out of the gradient,
        which here is that of the formula.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> method = Mixout(model, torch.optim.SGD(model.parameters(), lr=0.1), p=0.5)
        >>> result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        >>> list(method.pretrained)[:2]
        ['bert.encoder.layer.0.attention.self.query', 'bert.encoder.layer.0.attention.self.key']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: MaskProvider | AttachHandle | None = None,
        *,
        p: ProbabilityBelowOne = 0.7,
        **shared: Unpack[Shared],
    ) -> None:
        self.p = probability_below_one("p", p)
        layers = _layers(model)
        super().__init__(model, optimizer, provider, **shared)
        # Copied where the accelerator has put the model by now.
        self.pretrained = {name: layer.weight.detach().clone() for name, layer in layers.items()}
        self._layers = layers
        for name, layer in layers.items():
            layer.forward = functools.partial(_forward, layer, self.pretrained[name], p)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the model back as it was. Twice is fine."""
        for layer in self._layers.values():
            forward = vars(layer).get("forward")
            if isinstance(forward, functools.partial) and forward.func is _forward:
                del layer.forward
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
    """The linear layers to be mixed, by their name in the model."""
    base = getattr(model, "base_model", model)
    within = set(base.modules() if isinstance(base, nn.Module) else model.modules())
    # Subclasses have a forward of their own, or are read by others as weights (nn.MultiheadAttention).
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m in within}
    learning = {name: layer for name, layer in layers.items() if layer.weight.requires_grad}
    if not learning:
        raise InputError(f"Expected nn.Linear layers that learn in {type(base).__name__}, got none: nothing to mix.")
    if taken := [name for name, layer in learning.items() if "forward" in vars(layer)]:
        raise InputError(f"Expected linear layers with their own forward, got one that was replaced: {taken[0]}.")
    return learning


# A partial of a module-level function in the place of the forward: the model can still be pickled and copied.
def _forward(layer: nn.Linear, pretrained: Tensor, p: float, x: Tensor) -> Tensor:
    if not layer.training:
        return F.linear(x, layer.weight, layer.bias)
    # Torch's global generator, which gradient checkpointing replays.
    replaced = torch.rand(layer.in_features, device=x.device) < p
    return F.linear(x, mix(layer.weight, pretrained, replaced, p), layer.bias)
