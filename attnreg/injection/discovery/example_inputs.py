"""Tiny inputs with which a model can be run once to look for its attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Not the number of labels, heads or layers of any usual tiny model, so that shapes tell tokens from the rest.
LENGTH = 7
SAMPLES = 2  # so that the order of samples and heads in one dimension can be told


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments for one forward pass of ``model`` on two samples; empty if nothing is known of the model.

    Known are transformers models with token ids or images, and torch's own Transformer modules.

    Example:
        >>> example_inputs(nn.TransformerEncoderLayer(8, 2))["src"].shape
        torch.Size([2, 7, 8])
    """
    # Made in place, not moved: self-attention is told from cross-attention by its query being its key.
    like = next(model.parameters(), torch.empty(0))
    with torch.device(like.device):
        if hasattr(model, "config") and hasattr(model, "main_input_name"):
            return _transformers_inputs(model.config, str(model.main_input_name), like.dtype)
        return _torch_inputs(model, like.dtype)


def _transformers_inputs(config: Any, main_input: str, dtype: torch.dtype) -> dict[str, Tensor]:
    if main_input == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.zeros(SAMPLES, config.num_channels, height, width, dtype=dtype)}
    if main_input != "input_ids":
        return {}
    # Token 0 is padding in many vocabularies, and position ids may be counted from tokens that are not padding.
    ids = torch.arange(1, LENGTH + 1).repeat(SAMPLES, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :-1]
    return inputs


def _torch_inputs(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    if attention is None:
        return {}
    x = torch.zeros(SAMPLES, LENGTH, attention.embed_dim, dtype=dtype)
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        return {"src": x}
    if isinstance(model, (nn.TransformerDecoder, nn.TransformerDecoderLayer)):
        return {"tgt": x, "memory": x.clone()}
    if isinstance(model, nn.Transformer):
        return {"src": x, "tgt": x.clone()}
    if isinstance(model, nn.MultiheadAttention):
        return {"query": x, "key": x, "value": x}
    return {}
