"""Which weights of a model were not read from its files; transformers initializes them without a word."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from attnreg.errors import InputError, listed

_SHOWN = 5


def new_weights(info: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the weights that are new, from the loading information of transformers."""
    return frozenset(info["missing_keys"]) | {each[0] for each in info["mismatched_keys"]}


def weight_warnings(model: nn.Module, info: Mapping[str, Any], name: str, head_is_new: bool = True) -> list[str]:
    """Return one sentence for each kind of weights that were probably meant to be read, or raise if none was.

    A new head is not mentioned if it is usual (``head_is_new``), nor are unused weights of the checkpoint's own head.
    ``info`` is the loading information of transformers.
    """
    inside, other_sizes = _backbone(model), [each[0] for each in info["mismatched_keys"]]
    own = {key for key, _ in model.named_parameters() if key.startswith(inside)}
    if own and own <= new_weights(info):
        others = sorted({*info["unexpected_keys"], *other_sizes})
        held = f"other names or sizes, such as {listed(others, _SHOWN)}" if others else "none of them"
        raise InputError(f"No pretrained weight of --model {name} fits {type(model).__name__}: its file has {held}.")
    missing, resized = (
        [key for key in keys if not head_is_new or key.startswith(inside)]
        for keys in (info["missing_keys"], other_sizes)
    )
    found = {
        "lacks pretrained weights, which are newly initialized": missing,
        "has weights of other sizes than its configuration says, so they are newly initialized": resized,
        "has weights for which its configuration has no place, so they are not used": _unused(
            model, info["unexpected_keys"], inside
        ),
    }
    modules = {what: sorted({key.rpartition(".")[0] or key for key in keys}) for what, keys in found.items()}
    return [f"--model {name} {what}: {listed(names, _SHOWN)}." for what, names in modules.items() if names]


def class_warnings(names: Sequence[str], labels: Sequence[str], name: str) -> list[str]:
    """Say that a classifier, trained on the classes ``names``, is used for others, ``labels``, as many."""
    if [each.casefold() for each in names] == [each.casefold() for each in labels]:
        return []
    unnamed = list(names) == [f"LABEL_{number}" for number in range(len(names))]
    of = "it names no classes (id2label in config.json)" if unnamed else f"it was trained on {listed(names, _SHOWN)}"
    return [f"the classifier of --model {name} is kept, but {of}: they become {listed(labels, _SHOWN)}."]


def _backbone(model: nn.Module) -> tuple[str, ...]:
    """Return how the names of pretrained weights begin."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        return (f"{prefix}.",)
    return ("shared.", "encoder.", "decoder.")  # T5 with a language-model head


def _unused(model: nn.Module, keys: Iterable[str], inside: tuple[str, ...]) -> list[str]:
    """Return unused weights inside modules that the backbone has; others, such as poolers, are left out on purpose."""
    modules, found = dict(model.named_modules()), []
    for key in keys:
        whole = key if key.startswith(inside) else f"{inside[0]}{key}"
        known, _, leaf = whole.rpartition(".")
        while known and known not in modules:
            known = known.rpartition(".")[0]
        first, *further = whole[len(known) + 1 :].split(".")  # what the module lacks
        # Buffers of older versions, such as GPT-2's `attn.bias`, belong to no leaf module.
        is_leaf = not any(modules[known].children()) and any(True for _ in modules[known].parameters())
        if leaf in ("weight", "bias") and known.startswith(inside) and (further or is_leaf):
            found.append(f"{known}.{first}." if further else whole)
    return found
