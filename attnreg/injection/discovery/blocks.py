"""Finding the Transformer block around a self-attention, in the dry run of discovery."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Block:
    """A Transformer block, and at which of its calls.

    Args:
        module: its hidden states are the first argument of its forward, and the first or only thing that comes out.
        call: counted from 0.
        first: the name of that argument.
        alone: whether hidden states are all that comes out. Otherwise it is a tuple or list, or the block leaves
            something in a dict or list among its arguments, for later blocks.
    """

    module: nn.Module
    call: int
    first: str
    alone: bool


@dataclass(eq=False)
class ModuleCall:
    """One call of a module in the dry run.

    Args:
        module: the module.
        args: its positional arguments.
        kwargs: its arguments by name.
        index: how often it was called before.
        attentions: number of self-attentions computed in it.
        is_repeated: whether the module is called more than once in the pass.
        block: the module as a block, once it has returned hidden states in the shape in which it got them.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    attentions: int = 0
    is_repeated: bool = False
    block: Block | None = None

    def __post_init__(self) -> None:
        self._given = list(_leaves((self.args, self.kwargs)))

    def returns(self, output: Any) -> None:
        """The call ends."""
        if not self.attentions:
            return
        first = next(iter(list(inspect.signature(type(self.module).forward).parameters)[1:]), "")
        given = self.args[0] if self.args else self.kwargs.get(first)
        now = list(_leaves((self.args, self.kwargs)))
        same = len(now) == len(self._given) and all(a is b for a, b in zip(now, self._given, strict=True))
        alone = isinstance(output, Tensor) and same
        out = output[0] if type(output) in (tuple, list) and len(output) else output
        if not (isinstance(given, Tensor) and isinstance(out, Tensor) and given.is_floating_point()):
            return
        if given.shape == out.shape:
            self.block = Block(self.module, self.index, first, alone)


def _leaves(argument: Any) -> Iterator[Any]:
    """What is in tuples, lists and mappings; a cache is one thing: each block keeps its own part of it."""
    if isinstance(argument, (tuple, list, Mapping)):
        for each in argument.values() if isinstance(argument, Mapping) else argument:
            yield from _leaves(each)
    else:
        yield argument


def block_of(model: nn.Module, name: str, calls: Sequence[ModuleCall]) -> Block | None:
    """The block that holds an attention: the outermost entry of a list of modules with one self-attention in it.

    A model that is itself a block will do. Nothing else is taken for one, because a module that is only a part of a
    residual branch (a list of attentions, a list of pairs) must not be left out by itself.

    Args:
        model: the model.
        name: qualified name of the attention module.
        calls: of the modules that were running, the attention module's the last.
    """
    around = {call.module: call for call in calls[:-1]}
    entries = list(_entries(model, name))
    for entry in entries:
        call = around.get(entry)
        if call is None:
            return None
        if call.attentions == 1 and call.block is not None:
            return call.block
    return calls[0].block if not entries and calls[0].attentions == 1 and len(calls) > 1 else None


def _entries(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The entries of lists on the way to a module, from the outside."""
    parent = model
    for part in name.split("."):
        child = parent._modules.get(part)
        if child is None:
            return
        if isinstance(parent, LISTS):
            yield child
        parent = child
