"""Tiny inputs with which a model can be run once to look for its attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Not the number of labels, heads or layers of any usual tiny model, so that shapes tell tokens from the rest.
LENGTH = 7


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments for one forward pass of ``model``, batch 1; empty if nothing is known of the model.

    Known are transformers models with token ids or images, and torch's own Transformer modules.

    Example:
        >>> example_inputs(nn.TransformerEncoderLayer(8, 2))["src"].shape
        torch.Size([1, 7, 8])
    """
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        inputs = _transformers_inputs(model.config, str(model.main_input_name))
    else:
        inputs = _torch_inputs(model)
    parameter = next(model.parameters(), torch.empty(0))
    return {
        name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _transformers_inputs(config: Any, main_input: str) -> dict[str, Tensor]:
    if main_input == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width)}
    if main_input != "input_ids":
        return {}
    # Token 0 is padding in many vocabularies, and position ids may be counted from tokens that are not padding.
    ids = torch.arange(1, LENGTH + 1).unsqueeze(0)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :-1]
    return inputs


def _torch_inputs(model: nn.Module) -> dict[str, Tensor]:
    attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    if attention is None:
        return {}
    x = torch.zeros(1, LENGTH, attention.embed_dim)
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        return {"src": x}
    if isinstance(model, (nn.TransformerDecoder, nn.TransformerDecoderLayer)):
        return {"tgt": x, "memory": x.clone()}
    if isinstance(model, nn.Transformer):
        return {"src": x, "tgt": x.clone()}
    if isinstance(model, nn.MultiheadAttention):
        return {"query": x, "key": x, "value": x}
    return {}
