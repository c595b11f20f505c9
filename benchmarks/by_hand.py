"""What users write without attnreg: the peers of the arms in arms.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import attnreg

P = 0.1  # drop probability of every arm that is compared with one of these


def masked_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scores dropout as an attention function of transformers: a random boolean mask for torch's fused attention.

    A row whose scores are all dropped becomes NaN here, which attnreg's does not.
    """
    if module.training:
        keep = torch.rand(*query.shape[:-1], key.shape[-2], device=query.device) >= P
        attention_mask = keep if attention_mask is None else keep & attention_mask
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("masked_sdpa", masked_sdpa)
AttentionMaskInterface.register("masked_sdpa", sdpa_mask)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """Make a training step in a plain loop."""
    model.train()
    model(**batch).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class OneBackwardPassPerLayer(attnreg.AttributionProvider):
    """AD-DROP's first pass as in the official code: with dropout and weight gradients, a backward pass per layer."""

    def attribute(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        """Run the first pass of a model with eager attention."""
        self.clear()
        with attnreg.injection.handle_of(model, self).disabled():
            output = model(**batch, output_attentions=True)
        score = output.logits.max(-1).values.sum()
        for layer, weights in enumerate(output.attentions):
            self.attributions[f"encoder.{layer}"] = torch.autograd.grad(score, weights, retain_graph=True)[0]
        self._mask_next_pass({})  # the first pass was made by hand
