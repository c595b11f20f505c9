"""Number layers by the model's own lists of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn


def number_layers(model: nn.Module, names: Sequence[str]) -> tuple[list[int], int]:
    """Number the attention modules of one stack.

    A list of blocks is a ``ModuleList``, or a ``Sequential`` of modules of one class, each of whose entries contains at
    most one of these modules; the outermost such list counts. The layer number is the index in it, so blocks without
    attention count too. Numbers continue from list to list, in running order. A module in no such list is one layer.

    Args:
        model: the model.
        names: names of the attention modules, in the order in which they run.

    Returns:
        the layer numbers, and the number of layers.

    Example:
        >>> model = nn.ModuleList([nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)])
        >>> number_layers(model, ["0", "2"])
        ([0, 2], 3)
    """
    entries = [list(_entries(model, name)) for name in names]
    held = Counter((name, index) for each in entries for name, index, _ in each)
    crowded = {name for (name, _), count in held.items() if count > 1}
    begin: dict[str, int] = {}
    total = 0
    layers = []
    for position, each in enumerate(entries):
        name, index, length = next((entry for entry in each if entry[0] not in crowded), (f"#{position}", 0, 1))
        if name not in begin:
            begin[name] = total
            total += length
        layers.append(begin[name] + index)
    return layers, total


def lists_of_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all lists that may hold a model's blocks, with their names."""
    for name, module in model.named_modules():
        if _is_list(module):
            yield name, module


def _entries(model: nn.Module, name: str) -> Iterator[tuple[str, int, int]]:
    """Yield the lists that contain a module, outermost first: name, index in it, length."""
    parent, path = model, ""
    for part in name.split(".") if name else ():
        child = parent._modules.get(part)
        if child is None:
            return
        if _is_list(parent):
            yield path, list(parent._modules).index(part), len(parent._modules)
        parent, path = child, f"{path}.{part}".lstrip(".")


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return len({type(child) for child in module.children()}) == 1
    return isinstance(module, nn.ModuleList) and len(module) > 0
