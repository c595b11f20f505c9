"""The loss, logits and labels of a batch, under whichever names a model has them."""

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
    """Return a copy of a batch and its caches, if it is a dict of what the model's forward takes; else raise."""
    arguments = inspect.signature(model.forward).parameters
    known = [name for name, each in arguments.items() if each.kind is not each.VAR_KEYWORD]
    takes_any = len(known) < len(arguments)
    names = batch if isinstance(batch, Mapping) else ()
    strange = next((name for name in names if not (takes_any or name in known)), None)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids[0] if isinstance(ids, list) and ids else ids, (Tensor, NoneType)):
        raise InputError(
            f"Expected tensors in the batch, got a {type(ids).__name__} as 'input_ids': collate its rows, as with "
            "`transformers.DataCollatorWithPadding`."
        )
    needed = (name for name, each in arguments.items() if each.kind in _NAMED and each.default is each.empty)
    absent = next((name for name in needed if name not in names), None)
    missing = None if model._forward_pre_hooks_with_kwargs else absent  # a hook may add it
    if isinstance(batch, Mapping) and strange is None and missing is None:
        return own_caches(batch)
    found = f"{strange!r} in it" if strange is not None else f"no {missing!r}"
    got = found if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise InputError(
        f"Expected the batch to be a dict of arguments of {type(model).__name__}.forward({', '.join(known)}), got "
        f"{got}.{did_you_mean(str(strange), known)}"
    )


def own_caches(batch: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a batch, with its caches, because each pass writes its keys into one; gradients go through."""
    return {name: _copied(value) if hasattr(value, "get_seq_length") else value for name, value in batch.items()}


def _copied(cache: Any) -> Any:
    layers = [layer for part in (cache, *vars(cache).values()) for layer in getattr(part, "layers", ())]
    tensors = [each for layer in layers for each in vars(layer).values() if isinstance(each, Tensor)]
    return copy.deepcopy(cache, {id(each): each.clone() for each in tensors})  # only leaves can be copied otherwise


def loss_of(
    output: Any,
    batch: Mapping[str, Any],
    loss_function: LossFunction | None = None,
    name: str = "`loss_function` to the training method",
) -> Tensor:
    """Return the loss of a forward pass, 0-d: the function's, named ``name`` in messages, or the model's own."""
    if loss_function is not None:
        loss = loss_function(output, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise InputError(f"Expected {name.split()[0]} to return a 0-d tensor, got {got}.")
        return loss
    own = _field(output, "loss")
    if isinstance(output, tuple) and own is None:
        raise InputError("The model's output is a tuple, without names: set `return_dict=True` in its config.")
    if not isinstance(own, Tensor):
        raise InputError(
            f"The model's output, {type(output).__name__}, has no `loss`: pass `labels` in the batch, or {name}."
        )
    return own


def predictions_of(output: Any) -> Tensor | None:
    """Return the logits in a model's output: the output itself, or its ``logits``; ``None`` if it has none.

    A model for extractive question answering has two classifications over the N positions of a row, the start and the
    end of the answer: ``start_logits`` and ``end_logits`` become ``(B, 2, N)``.
    """
    if isinstance(output, Tensor):
        return output
    ends = [_field(output, f"{name}_logits") for name in _ENDS]
    if all(isinstance(each, Tensor) for each in ends):
        return torch.stack(ends, 1)
    logits = _field(output, "logits")
    return logits if isinstance(logits, Tensor) else None


def labels_of(batch: Mapping[str, Any], logits: Tensor) -> Any:
    """Return the labels that belong to logits; ``None`` if the batch has none.

    For extractive question answering, these are ``start_positions`` and ``end_positions``, as ``(B, 2)``. A position
    beyond the row counts as not labelled, as in the losses of transformers.
    """
    ends = [batch.get(name) for name in _POSITIONS]
    if batch.get("labels") is not None or not all(isinstance(each, Tensor) for each in ends):
        return batch.get("labels")
    positions = torch.stack([each.reshape(-1) for each in ends if isinstance(each, Tensor)], 1).clamp(min=0)
    return positions.masked_fill(positions >= logits.shape[-1], IGNORED)


def needed_labels_of(batch: Mapping[str, Any], logits: Tensor) -> Tensor:
    """Return what :func:`labels_of` returns, or raise if the batch has no labels."""
    labels = labels_of(batch, logits)
    if not isinstance(labels, Tensor):
        raise InputError(f"The batch has no labels, got {', '.join(batch)}: pass them as `labels`.")
    return labels


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model compares each label with the logits one position before it, as causal language models do.

    The class of the outermost model of transformers, or one that it derives from, tells.
    """
    from transformers import PreTrainedModel  # late: it is slow to import
    from transformers.models.auto import modeling_auto

    outermost = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if outermost is None or getattr(outermost.config, "is_encoder_decoder", False):
        return False
    shifting = {
        name
        for names in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )
        for each in names.values()
        for name in ([each] if isinstance(each, str) else each)
    }
    return any(cls.__name__ in shifting for cls in type(outermost).__mro__)


def is_multi_label(model: nn.Module) -> bool:
    """Whether the configuration of a model says that each row has any number of labels."""
    configs = (config for module in model.modules() if (config := getattr(module, "config", None)) is not None)
    outermost = next(configs, None)  # the model may be wrapped
    return getattr(outermost, "problem_type", None) == "multi_label_classification"


def moved_labels(labels: Tensor) -> Tensor:
    """Return labels ``(B, N)``, each one position earlier; the last position has none."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def after_virtual(model: Any, given: Tensor, logits: Tensor | None, value: int = IGNORED) -> Tensor:
    """Return what tokens are given, ``(B, N)``, with a value for those that peft's prompt puts before them."""
    config = getattr(model, "active_peft_config", None)
    virtual = getattr(config, "num_virtual_tokens", None) or 0
    fits = getattr(config, "peft_type", None) != "PREFIX_TUNING" and given.dim() == 2
    if logits is not None:
        fits = given.dim() == 2 < logits.dim() and logits.shape[1] == given.shape[1] + virtual
    return F.pad(given, (virtual, 0), value=value) if fits else given


def aligned_labels(model: nn.Module, labels: Tensor, logits: Tensor | None = None) -> Tensor:
    """Return the labels with each at the position whose logits predict it, ``(B, N)``; other labels as they are."""
    labels = after_virtual(model, labels, logits)
    return moved_labels(labels) if labels.dim() == 2 and shifts_labels(model) else labels


def rows_of(batch: Mapping[str, Any]) -> int:
    """Return the number of labelled rows of a batch: of its labels, else of its first tensor."""
    labels = batch.get("labels")
    tensors = (each for each in batch.values() if isinstance(each, Tensor) and each.dim())
    return len(labels if isinstance(labels, Tensor) else next(tensors))


def terms_of(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Return the number of terms in the mean that is the loss of a batch; of two means, that of the longer one."""
    labels = batch.get("labels")
    if labels is None and (ends := _labelled_ends(batch)):
        return max(int(each.sum()) for each in ends)
    if labels is None or labels.is_floating_point():
        return rows_of(batch)
    return int((aligned_labels(model, labels) != IGNORED).sum())


def check_one_mean(batch: Mapping[str, Any]) -> None:
    """Raise if the model's own loss of a batch is a sum of two means: no weights of parts make it from theirs."""
    ends = _labelled_ends(batch)
    if ("labels" in batch and batch.keys() & _SECOND_LABELS) or any(not torch.equal(each, ends[0]) for each in ends):
        raise InputError("The loss is a sum of two means, of which parts have other shares: use `micro_batches=1`.")


def _labelled_ends(batch: Mapping[str, Any]) -> list[Tensor]:
    """Return which starts, and which ends, of answers are in their row, ``(B,)``: others are not labelled."""
    tokens = next((x for name in _TOKENS if isinstance(x := batch.get(name), Tensor)), None)
    ends = [x.reshape(-1) for name in _POSITIONS if isinstance(x := batch.get(name), Tensor)]
    return [x < (math.inf if tokens is None else tokens.shape[1]) for x in ends]


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
