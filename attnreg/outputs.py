"""The loss, logits and labels of a batch, under the names that models use."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attnreg.errors import InputError, did_you_mean

IGNORED = -100  # transformers' label for positions without one
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ENDS = ("start", "end")  # of an answer in a text
_POSITIONS = [f"{name}_positions" for name in _ENDS]
_TOKENS = "input_ids", "inputs_embeds", "attention_mask"
_SECOND_LABELS = {"next_sentence_label", "sentence_order_label", "mc_labels"}  # of transformers' models with two losses
#: computes the loss, 0-d, from the model's output and the batch
LossFunction = Callable[[Any, Mapping[str, Any]], Tensor]


def a_batch(model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """Return a copy of a batch and its caches, if it is a dict of arguments of the model's forward; else raise."""
    arguments = inspect.signature(model.forward).parameters
    known = [name for name, arg in arguments.items() if arg.kind is not arg.VAR_KEYWORD]
    wanted = f"Expected the batch to be a dict of arguments of {type(model).__name__}.forward({', '.join(known)}), got"
    if not isinstance(batch, Mapping):
        raise InputError(f"{wanted} a {type(batch).__name__}.")
    ids = batch.get("input_ids")
    if not isinstance(ids[0] if isinstance(ids, list) and ids else ids, (Tensor, NoneType)):
        raise InputError(
            f"Expected tensors in the batch, got a {type(ids).__name__} as 'input_ids': collate its rows, as with "
            "`transformers.DataCollatorWithPadding`."
        )
    unknown = [name for name in batch if name not in known]
    if unknown and len(known) == len(arguments):
        raise InputError(f"{wanted} {unknown[0]!r} in it.{did_you_mean(str(unknown[0]), known)}")
    needed = [name for name, arg in arguments.items() if arg.kind in _NAMED and arg.default is arg.empty]
    missing = [name for name in needed if name not in batch]
    if missing and not model._forward_pre_hooks_with_kwargs:  # a hook may add it
        raise InputError(f"{wanted} no {missing[0]!r}.")
    return own_caches(batch)


def own_caches(batch: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a batch and of its caches, because a pass writes its keys into one; gradients go through."""
    return {name: _copied(value) if hasattr(value, "get_seq_length") else value for name, value in batch.items()}


def _copied(cache: Any) -> Any:
    layers = [layer for part in (cache, *vars(cache).values()) for layer in getattr(part, "layers", ())]
    tensors = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return copy.deepcopy(cache, {id(tensor): tensor.clone() for tensor in tensors})  # torch only copies leaves deeply


def loss_of(
    output: Any,
    batch: Mapping[str, Any],
    loss_function: LossFunction | None = None,
    name: str = "`loss_function` to the training method",
) -> Tensor:
    """Return the loss of a forward pass, 0-d: from the function, whose name in messages is ``name``, or the model."""
    if loss_function is not None:
        loss = loss_function(output, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise InputError(f"Expected {name.split()[0]} to return a 0-d tensor, got {got}.")
        return loss
    loss = _field(output, "loss")
    if isinstance(output, tuple) and loss is None:
        raise InputError("The model's output is a tuple, without names: set `return_dict=True` in its config.")
    if not isinstance(loss, Tensor):
        raise InputError(
            f"The model's output, {type(output).__name__}, has no `loss`: pass `labels` in the batch, or {name}."
        )
    return loss


def predictions_of(output: Any) -> Tensor | None:
    """Return the logits in a model's output: the output itself, or its ``logits``; ``None`` if it has none.

    A model for extractive question answering has two classifications over the N positions of a row, the start and the
    end of the answer: ``start_logits`` and ``end_logits`` become ``(B, 2, N)``.
    """
    if isinstance(output, Tensor):
        return output
    ends = [_field(output, f"{name}_logits") for name in _ENDS]
    if all(isinstance(logits, Tensor) for logits in ends):
        return torch.stack(ends, 1)
    logits = _field(output, "logits")
    return logits if isinstance(logits, Tensor) else None


def labels_of(batch: Mapping[str, Any], logits: Tensor) -> Any:
    """Return the labels that belong to logits; ``None`` if the batch has none.

    For extractive question answering, labels are ``start_positions`` and ``end_positions``, as ``(B, 2)``. A position
    beyond the row counts as not labelled, as in the losses of transformers.
    """
    ends = [batch.get(name) for name in _POSITIONS]
    if batch.get("labels") is not None or not all(isinstance(end, Tensor) for end in ends):
        return batch.get("labels")
    positions = torch.stack([end.reshape(-1) for end in ends if isinstance(end, Tensor)], 1).clamp(min=0)
    return positions.masked_fill(positions >= logits.shape[-1], IGNORED)


def needed_labels_of(batch: Mapping[str, Any], logits: Tensor) -> Tensor:
    """Return the result of :func:`labels_of`, or raise if the batch has no labels."""
    labels = labels_of(batch, logits)
    if not isinstance(labels, Tensor):
        raise InputError(f"The batch has no labels, got {', '.join(batch)}: pass them as `labels`.")
    return labels


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model compares labels with the logits one position before them, as causal language models do.

    This follows from the class of the outermost model of transformers, or from one of its base classes.
    """
    from transformers import PreTrainedModel  # late: it is slow to import
    from transformers.models.auto import modeling_auto

    outermost = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if outermost is None or getattr(outermost.config, "is_encoder_decoder", False):
        return False
    tables = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    shifting = {*tree_leaves([[*table.values()] for table in tables])}  # some values are tuples of names
    return any(cls.__name__ in shifting for cls in type(outermost).__mro__)


def is_multi_label(model: nn.Module) -> bool:
    """Whether the configuration of a model says that a row may have any number of labels."""
    configs = (config for module in model.modules() if (config := getattr(module, "config", None)) is not None)
    outermost = next(configs, None)  # the model may be wrapped
    return getattr(outermost, "problem_type", None) == "multi_label_classification"


def moved_labels(labels: Tensor) -> Tensor:
    """Return labels ``(B, N)``, moved one position to the left; the last position has none."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def after_virtual(model: Any, values: Tensor, logits: Tensor | None, value: int = IGNORED) -> Tensor:
    """Return the values of tokens, ``(B, N)``, padded for the virtual tokens that peft's prompt puts before them."""
    config = getattr(model, "active_peft_config", None)
    virtual = getattr(config, "num_virtual_tokens", None) or 0
    fits = getattr(config, "peft_type", None) != "PREFIX_TUNING" and values.dim() == 2
    if logits is not None:
        fits = values.dim() == 2 < logits.dim() and logits.shape[1] == values.shape[1] + virtual
    return F.pad(values, (virtual, 0), value=value) if fits else values


def aligned_labels(model: nn.Module, labels: Tensor, logits: Tensor | None = None) -> Tensor:
    """Return the labels at the positions whose logits predict them, ``(B, N)``; other labels unchanged."""
    labels = after_virtual(model, labels, logits)
    return moved_labels(labels) if labels.dim() == 2 and shifts_labels(model) else labels


def rows_of(batch: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch: the length of its labels, else of its first tensor."""
    labels = batch.get("labels")
    tensors = (value for value in batch.values() if isinstance(value, Tensor) and value.dim())
    return len(labels if isinstance(labels, Tensor) else next(tensors))


def terms_of(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Return the number of terms in the mean that is the loss of a batch; of two means, the larger number."""
    labels = batch.get("labels")
    if labels is None and (ends := _labelled_ends(batch)):
        return max(int(labelled.sum()) for labelled in ends)
    if labels is None or labels.is_floating_point():
        return rows_of(batch)
    return int((aligned_labels(model, labels) != IGNORED).sum())


def check_one_mean(batch: Mapping[str, Any]) -> None:
    """Raise if the model's loss of a batch is a sum of two means, which is no weighted sum of the losses of parts."""
    ends = _labelled_ends(batch)
    if ("labels" in batch and batch.keys() & _SECOND_LABELS) or any(not torch.equal(end, ends[0]) for end in ends):
        raise InputError("The loss is a sum of two means, of which parts have other shares: use `micro_batches=1`.")


def _labelled_ends(batch: Mapping[str, Any]) -> list[Tensor]:
    """Return whether the starts, and the ends, of answers are in their rows, ``(B,)``; if not, they are no labels."""
    tokens = next((x for name in _TOKENS if isinstance(x := batch.get(name), Tensor)), None)
    ends = [x.reshape(-1) for name in _POSITIONS if isinstance(x := batch.get(name), Tensor)]
    return [x < (math.inf if tokens is None else tokens.shape[1]) for x in ends]


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
