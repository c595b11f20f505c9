"""Find the Transformer block around a self-attention, and number layers by the model's lists of blocks."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(eq=False)
class ModuleCall:
    """One call of a module in the dry run."""

    module: nn.Module
    args: tuple[Any, ...]  # its positional arguments
    kwargs: dict[str, Any]  # its keyword arguments
    index: int  # number of earlier calls of the module
    attention_count: int = 0  # number of self-attention computations in it
    is_repeated: bool = False  # whether the module is called more than once in the pass
    is_entry: bool = False  # whether the module is an entry of a list, as blocks are
    around: tuple[ModuleCall, ...] = ()  # the calls around it, outermost first
    rows: int = 0  # number of vectors that a linear layer was called on
    input_name: str = ""  # name of the first argument
    # whether it is a block: its first argument is hidden states, and its output, or the first entry of its output, is
    # hidden states of the same shape
    is_block: bool = False
    shape: tuple[int, ...] = ()  # the shape of a block's hidden states
    # whether a block returns only hidden states. If not, it returns a tuple or list, or stores something for later
    # blocks in a dict or list among its arguments
    only_states: bool = False

    def __post_init__(self) -> None:
        self._leaves_before = list(_leaves((self.args, self.kwargs)))

    @property
    def states(self) -> Any:
        """Its first argument, the hidden states of a block; known when the call has ended."""
        return self.args[0] if self.args else self.kwargs.get(self.input_name)

    def end(self, output: Any) -> None:
        """Describe the call by its output and by what it has stored in its arguments."""
        if not (self.attention_count or self.is_entry):
            return
        self.input_name = next(iter(input_names(self.module)), "")
        states = self.states
        before, after = self._leaves_before, list(_leaves((self.args, self.kwargs)))
        stored = len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True))
        self.only_states = isinstance(output, Tensor) and not stored
        out = output[0] if type(output) in (tuple, list) and len(output) else output
        if not (isinstance(states, Tensor) and isinstance(out, Tensor) and states.is_floating_point()):
            return
        self.is_block, self.shape = states.shape == out.shape, tuple(states.shape)


def input_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _leaves(argument: Any) -> Iterator[Any]:
    """Yield the leaves of tuples, lists and mappings. A cache is one leaf, because blocks write to separate parts."""
    if isinstance(argument, (tuple, list, Mapping)):
        for child in argument.values() if isinstance(argument, Mapping) else argument:
            yield from _leaves(child)
    else:
        yield argument


def block_of(model: nn.Module, name: str, calls: Sequence[ModuleCall]) -> ModuleCall | None:
    """Return the block around an attention: the outermost entry of a module list with one self-attention in it.

    A model may itself be a block. No other module counts as one, because a module that is only part of a residual
    branch (an entry of a list of attentions or of pairs) must not be skipped alone. ``calls`` are the calls that were
    running, outermost first; the last call is that of the attention module.
    """
    around = {call.module: call for call in calls[:-1]}
    entries = [parent._modules[key] for _, parent, key in lists_around(model, name)]
    for entry in entries:
        call = None if entry is None else around.get(entry)
        if call is None:
            return None
        if call.attention_count == 1 and call.is_block:
            return call
    whole = calls[0]
    return whole if not entries and whole.is_block and whole.attention_count == 1 and len(calls) > 1 else None


def lists_around(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the lists that contain a module, outermost first: name, list, key of the entry around the module."""
    parent, path = model, ""
    for key in name.split("."):
        child = parent._modules.get(key)
        if child is None:
            return
        if isinstance(parent, LISTS):
            yield path, parent, key
        parent, path = child, f"{path}.{key}".lstrip(".")


def number_layers(model: nn.Module, names: Sequence[str]) -> tuple[list[int], int]:
    """Return the layer numbers of the attention modules ``names`` of one stack, in running order, and their total.

    A list of blocks is a ``ModuleList``, or a ``Sequential`` of modules of one class, whose entries contain at most one
    of these attention modules; the outermost such list counts. The layer number is the index in the list, so blocks
    without attention count too. Numbers continue from list to list, in running order. A module in no list is one layer.
    """
    entries_by_module = [
        [
            (path, list(parent._modules).index(key), len(parent._modules))
            for path, parent, key in lists_around(model, name)
            if may_hold_blocks(parent)
        ]
        for name in names
    ]
    modules_in = Counter((path, index) for entries in entries_by_module for path, index, _ in entries)
    crowded = {path for (path, _), count in modules_in.items() if count > 1}
    begin: dict[str, int] = {}
    total = 0
    layers = []
    for number, entries in enumerate(entries_by_module):
        path, index, length = next((entry for entry in entries if entry[0] not in crowded), (f"#{number}", 0, 1))
        if path not in begin:
            begin[path] = total
            total += length
        layers.append(begin[path] + index)
    return layers, total


def may_hold_blocks(module: nn.Module) -> bool:
    """Whether a module is a list that may hold a model's blocks."""
    if isinstance(module, nn.Sequential):
        return len({type(child) for child in module.children()}) == 1
    return isinstance(module, nn.ModuleList) and len(module) > 0
