"""Pooling: which state of a sequence its classification head reads."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from attnreg.errors import InputError

if TYPE_CHECKING:  # the options of recipes name the poolings, and should not import torch
    from torch import Tensor, nn

Pooling = Literal["own", "cls", "mean", "last"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
_KEY = "attnreg_pooling"  # in a model's configuration
POOLED = "AutoModelForSequenceClassification"  # the auto class of heads that read one state


def pool(model: Any, pooling: Pooling, usual: Pooling = "own") -> None:
    """Let the classification head of a model read one pooled state of the last layer. Changes the model in place.

    The pooled state replaces the states of all tokens, and the output of the model's pooler, so that every head reads
    it. The choice is saved in the model's configuration; transformers alone does not know it.

    Args:
        model: a model of transformers for sequence classification, with an encoder or a decoder, not both.
        pooling: ``"cls"`` (the first token's state), ``"mean"`` (of all tokens that are no padding), ``"last"`` (the
            last such token's), or ``"own"``, which is what the model's head reads.
        usual: the default of the checkpoint; an ``"own"`` that differs from it is saved in the configuration, too.

    Reference:
        The mean: Sentence-BERT (arXiv 1908.10084), Section 3.
    """
    if pooling == "own":
        if usual != "own":
            setattr(model.config, _KEY, pooling)
        return
    from torch import nn

    if model.config.is_encoder_decoder:
        raise InputError(f"--pooling is for encoders and decoders, but {type(model).__name__} has both: remove it.")
    setattr(model.config, _KEY, pooling)
    pooler = getattr(model.base_model, "pooler", None)
    if isinstance(pooler, nn.Module):  # nothing reads it now, and several processes would wait for its gradients
        pooler.requires_grad_(False)
    # No closure, so that it is copied and pickled with the model.
    model.base_model.register_forward_hook(functools.partial(_put_pooled, pooling), with_kwargs=True)


def usual_pooling(config: Any, name: str) -> Pooling:
    """Return the pooling that a model was saved with, or trained with by sentence-transformers; else ``"own"``."""
    from transformers.utils.hub import cached_file

    if (saved := saved_pooling(config)) is not None:
        return saved
    path = cached_file(name, "1_Pooling/config.json", _raise_exceptions_for_missing_entries=False)
    if path is None:
        return "own"
    modes = json.loads(Path(path).read_text(encoding="utf-8"))
    return "mean" if modes.get("pooling_mode_mean_tokens") or modes.get("pooling_mode") == "mean" else "own"


def saved_pooling(config: Any) -> Pooling | None:
    """Return the pooling in a configuration, if there is any."""
    return getattr(config, _KEY, None)


def _put_pooled(pooling: Pooling, base: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Replace the states of all tokens by the pooled one; a forward hook of a model without its head."""
    import torch

    mask = inspect.signature(base.forward).bind_partial(*args, **kwargs).arguments.get("attention_mask")
    states: Tensor | None = getattr(output, "last_hidden_state", None)
    if states is None or (mask is not None and mask.shape != states.shape[:2]):
        raise InputError(f"--pooling needs a state per token, but {type(base).__name__} has none: remove it.")
    mask = states.new_ones(states.shape[:2]) if mask is None else mask
    if pooling == "mean":
        exact = torch.promote_types(states.dtype, torch.float32)
        weights = (mask / mask.sum(1, keepdim=True).clamp(min=1)).to(exact)
        pooled = (weights[:, None] @ states.to(exact))[:, 0].to(states.dtype)
    else:  # the first or last of the tokens that are no padding, which may stand on either side
        index = mask.argmax(1) if pooling == "cls" else mask.shape[1] - 1 - mask.flip(1).argmax(1)
        pooled = states[range(len(states)), index]
    output["last_hidden_state"] = pooled[:, None].expand_as(states)
    if getattr(output, "pooler_output", None) is not None:
        output["pooler_output"] = pooled
    return output
