"""The sizes and initial embeddings that a Generator copies from a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnreg.errors import InputError
from attnreg.injection import discover


class Measured(NamedTuple):
    """Sizes and embeddings of a model, for a Generator."""

    sizes: dict[str, Any]  # arguments of the G-Net
    weights: Mapping[str, Tensor]  # initial weights of the G-Net's network, by name
    device: torch.device
    heads: int | None  # heads of a masked layer; None if layers differ

    def number(self, name: str, number: int | str) -> int:
        """Return an argument that is a number, or "heads" for the number of heads."""
        if not isinstance(number, str):
            return number
        if number != "heads":
            raise InputError(f"Expected `{name}` to be a whole number or 'heads', got {number!r}.")
        if self.heads is None:
            raise InputError(f"Expected `{name}` to be a number, because the layers of this model differ in heads.")
        return self.heads


def measure_model(model: nn.Module, example_inputs: Any) -> Measured:
    """Return the sizes and embeddings of a model that takes token ids."""
    tokens, positions, offset = embedding_tables(model)
    every_site = [site.info for site in discover(model, example_inputs).sites]
    stack = "encoder" if any(site.stack == "encoder" for site in every_site) else "decoder"
    sites = [site for site in every_site if site.stack == stack]
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    sizes = {
        "vocab_size": tokens.weight.shape[0],
        "hidden_size": tokens.weight.shape[1],
        "num_layers": max((site.num_layers for site in sites), default=0),
        "max_length": 512 if positions is None else positions.weight.shape[0] - offset,
        "causal": stack == "decoder",
        "position_offset": offset,
        "pad_token_id": None if padding is None or padding < 0 else padding,
    }
    weights: dict[str, Tensor] = {"tokens.weight": tokens.weight}
    weights |= {} if positions is None else {"positions.weight": positions.weight}
    known = {site.heads for site in sites if site.heads is not None}
    heads = known.pop() if len(known) == 1 else getattr(getattr(model, "config", None), "num_attention_heads", None)
    return Measured(sizes, weights, tokens.weight.device, heads)


def embedding_tables(model: nn.Module) -> tuple[nn.Embedding, nn.Embedding | None, int]:
    """Find a model's token embeddings, its absolute position embeddings, and the index of the first position."""
    tables = {name: module for name, module in model.named_modules() if _is_table(module)}
    tokens: Any = None
    if not hasattr(model, "get_input_embeddings"):
        tokens = next((table for name, table in tables.items() if not _is_position(name)), None)
    else:
        with suppress(NotImplementedError):  # raised by transformers' models without token embeddings
            tokens = model.get_input_embeddings()  # type: ignore[operator]
    if not _is_table(tokens):
        reason = "takes no token ids, or has no single embedding table for them, which G-Net needs"
        raise InputError(f"{type(model).__name__} {reason}: use another provider.")
    parent = next((name for name, table in tables.items() if table is tokens), "").rpartition(".")[0]
    width = tokens.weight.shape[1]
    nearby = (table for name, table in tables.items() if _is_position(name) and _is_beside(name, parent))
    positions = next((table for table in nearby if table.weight.shape[1] == width), None)
    if positions is None:
        return tokens, None, 0
    first = -1 if positions.padding_idx is None else positions.padding_idx
    return tokens, positions, getattr(positions, "offset", first + 1)


def _is_table(module: Any) -> bool:
    """Return whether a module is an embedding, perhaps not a class of torch (I-BERT's)."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and hasattr(module, "padding_idx")


def _is_position(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "position" in last or last == "wpe"


def _is_beside(name: str, module: str) -> bool:
    """Return whether a table is in a module or in one around it, and not, say, in a model's image encoder."""
    parent = name.rpartition(".")[0]
    return not module or f"{name}.".startswith(f"{module}.") or not parent or f"{module}.".startswith(f"{parent}.")
