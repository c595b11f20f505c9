"""Measure a model for its Generator: sizes, and the embeddings to begin with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnreg.attendout.generator import embedding_tables
from attnreg.attendout.patches import patches_of
from attnreg.errors import InputError
from attnreg.injection import discover


class Measured(NamedTuple):
    """What a Generator takes over from a model.

    Args:
        sizes: arguments of the Generator.
        weights: values of its parameters, by name.
        device: the model's device.
    """

    sizes: dict[str, Any]
    weights: Mapping[str, Tensor]
    device: torch.device

    def copy_into(self, network: nn.Module) -> None:
        """Copy the weights into the Generator's network."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                network.get_parameter(name).copy_(weight)


def measured(model: nn.Module, example_inputs: Any, *, share_embeddings: bool) -> Measured:
    """Measure a model that takes token ids, or a Vision Transformer.

    Raises:
        InputError: if it is neither.
        NoAttentionError: if no attention is found in the model.
    """
    try:
        tokens, positions, offset = embedding_tables(model)
    except InputError:
        if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
            raise
        return _of_images(model, example_inputs, share_embeddings=share_embeddings)
    present = {"tokens": tokens} if positions is None else {"tokens": tokens, "positions": positions}
    depth = {site.info.stack: site.info.num_layers for site in discover(model, example_inputs).sites}
    sizes = {
        "vocab_size": tokens.weight.shape[0],
        "hidden_size": tokens.weight.shape[1],
        "num_layers": depth.get("encoder") or depth.get("decoder", 0),
        "max_length": 512 if positions is None else positions.weight.shape[0] - offset,
        "causal": "encoder" not in depth,
        "position_offset": offset,
        "pad_token_id": getattr(getattr(model, "config", None), "pad_token_id", None),
        "shared_tables": list(present) if share_embeddings else (),
    }
    weights = {} if share_embeddings else {f"{name}.weight": table.weight for name, table in present.items()}
    return Measured(sizes, weights, tokens.weight.device)


def _of_images(model: nn.Module, example_inputs: Any, *, share_embeddings: bool) -> Measured:
    if share_embeddings:
        raise InputError(
            f"{type(model).__name__} has no table of token embeddings to share: leave out `share_embeddings`."
        )
    found = patches_of(model, example_inputs)
    projection = found.projection
    sizes = {
        "vocab_size": found.before,
        "hidden_size": projection.out_channels,
        "num_layers": found.num_layers,
        "max_length": found.length,
        "patch": [projection.in_channels, *projection.kernel_size],
    }
    weights = {"tokens.projection.weight": projection.weight}
    if projection.bias is not None:
        weights["tokens.projection.bias"] = projection.bias
    if found.positions is not None:
        weights["positions.weight"] = found.positions
    return Measured(sizes, weights, projection.weight.device)
