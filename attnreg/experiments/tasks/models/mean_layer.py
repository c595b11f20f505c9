"""Mean pooling that transformers computes by itself: a BERT's further layer, whose first token attends to all alike."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MEAN = 100.0  # weight of the mean beside the first token's own state, which a layer adds
_FLAT = 0.5  # factor within the tanh of the pooler


def pool_mean(model: Any) -> bool:
    """Let the head of a BERT read the normalized mean of all tokens, as :func:`with_mean_layer` computes it.

    Changes the model in place, and returns whether it could: it must be ``BertForSequenceClassification``.

    Reference:
        The mean: Sentence-BERT (arXiv 1908.10084), Section 3.
    """
    if type(model).__name__ != "BertForSequenceClassification":
        return False
    model.bert.pooler.requires_grad_(False)
    model.bert.register_forward_hook(_put_mean, with_kwargs=True)
    return True


def with_mean_layer(model: Any) -> Any:
    """Return a model without hooks that computes what one of :func:`pool_mean` does, in one layer more.

    In this layer, the first token attends to all tokens alike; its feed-forward network adds nothing.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += 1
    made = type(model)(config)
    made.load_state_dict(model.state_dict(), strict=False)
    layer, pooler = made.bert.encoder.layer[-1], made.bert.pooler.dense
    with torch.no_grad():
        for each in (each for part in (layer, made.bert.pooler) for each in part.modules()):
            if isinstance(each, nn.Linear):
                nn.init.zeros_(each.weight)
                nn.init.zeros_(each.bias)
            elif isinstance(each, nn.LayerNorm):
                each.reset_parameters()
        nn.init.eye_(layer.attention.self.value.weight).mul_(_MEAN)
        nn.init.eye_(layer.attention.output.dense.weight)
        nn.init.eye_(pooler.weight).mul_(_FLAT)
    return made.to(model.device).eval()


def _put_mean(base: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Replace the pooler's output; a forward hook of a BERT without its head, whose inputs have names."""
    states: Tensor = output.last_hidden_state
    mask = kwargs["attention_mask"]
    mean = (mask / mask.sum(1, keepdim=True)).to(states.dtype)[:, None] @ states
    normalized = F.layer_norm(mean[:, 0] + states[:, 0] / _MEAN, states.shape[-1:])
    output["pooler_output"] = torch.tanh(_FLAT * normalized)
    return output
