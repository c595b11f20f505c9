"""Mean pooling that transformers computes by itself: a further layer that attends to all tokens alike."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MEAN = 100.0  # weight of the mean, to which a layer adds the state of the token
_FLAT = 0.5  # factor within the tanh that follows
_POOLED = ("BertForSequenceClassification",)  # the head reads the pooler's output
_DENSE = (
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
    "CamembertForSequenceClassification",
)


def pool_mean(model: Any) -> bool:
    """Let the head of a BERT or RoBERTa read the normalized mean of all tokens, as :func:`with_mean_layer` computes it.

    Changes the model in place, and returns whether it could. The dense layer before the head begins as the identity.

    Reference:
        The mean: Sentence-BERT (arXiv 1908.10084), Section 3.
    """
    name = type(model).__name__
    if name not in (*_POOLED, *_DENSE):
        return False
    if name in _DENSE:
        _to_identity(model.classifier.dense, _FLAT)
    else:
        model.bert.pooler.requires_grad_(False)  # unused: its output is replaced
    model.base_model.register_forward_hook(_put_mean, with_kwargs=True)
    return True


def with_mean_layer(model: Any) -> Any:
    """Return a model without hooks that computes the same as one of :func:`pool_mean`, with one layer more.

    In this layer, all tokens attend to all tokens alike; its feed-forward network adds nothing.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += 1
    deeper = type(model)(config)
    deeper.load_state_dict(model.state_dict(), strict=False)
    layer = deeper.base_model.encoder.layer[-1]
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    _to_identity(layer.attention.self.value, _MEAN)
    _to_identity(layer.attention.output.dense, 1.0)
    if type(model).__name__ in _POOLED:
        _to_identity(deeper.bert.pooler.dense, _FLAT)
    return deeper.to(model.device).eval()


def _to_identity(layer: nn.Linear, factor: float) -> None:
    with torch.no_grad():
        nn.init.eye_(layer.weight).mul_(factor)
        nn.init.zeros_(layer.bias)


def _put_mean(base: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Replace the states of all tokens by their mean; a forward hook of a model without its head, with named inputs."""
    states: Tensor = output.last_hidden_state
    mask = kwargs["attention_mask"]
    mean = (mask / mask.sum(1, keepdim=True)).to(states.dtype)[:, None] @ states
    normalized = F.layer_norm(mean + states[:, :1] / _MEAN, states.shape[-1:])
    output["last_hidden_state"] = normalized.expand_as(states)
    if output.get("pooler_output") is not None:
        output["pooler_output"] = torch.tanh(_FLAT * normalized[:, 0])
    return output
