"""What of a model's attention is left out, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from torch import nn

from attnreg.injection.discovery.finder import Finder
from attnreg.injection.discovery.numbering import lists_of_blocks

_NAMED = re.compile(r"att(entio)?n", re.IGNORECASE)
_PART = re.compile(r"dropout|norm|mask|bias|embed|rotary|output|intermediate|pos(ition)?_|project", re.IGNORECASE)

NO_PRODUCTS = "its scores are no products of queries and keys"
NO_VALUES = "its weights are not multiplied with values"
NOT_SOFTMAX = "its weights come out of nothing that can be masked, such as log_softmax, sigmoid or a compiled function"
UNSEEN = "no softmax and no fused attention was seen in it"
NOT_CHOSEN = "it is not among the `stacks`, `layers` and `modules` that were asked for"
NOT_RUN = "it did not run on the example inputs"


@dataclass(frozen=True)
class LeftOut:
    """What :func:`attnreg.attach` leaves as it is.

    Args:
        name: of the module.
        seen: what was seen there.
        reason: why it is left out.
        is_attention: whether it is attention, or named so.
    """

    name: str
    seen: str
    reason: str
    is_attention: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.seen}: {self.reason})"


def left_out(finder: Finder, model: nn.Module) -> tuple[LeftOut, ...]:
    """What a dry run has seen besides the attention that can be masked."""
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    return tuple(dict.fromkeys((*_seen(finder, names), *_named(finder, model))))


def stacks_left_out(left: Sequence[LeftOut], model: nn.Module, covered: Set[str]) -> dict[str, LeftOut]:
    """Lists of blocks in which there is attention, by name, and none that was found.

    Args:
        left: what is left out.
        model: the model.
        covered: names of the modules that hold attention that was found.
    """
    attention = [each for each in left if each.is_attention]
    whole = {}
    for name, blocks in lists_of_blocks(model):
        inside = [each for each in attention if each.name.startswith(f"{name}." if name else "")]
        if len(blocks._modules) > 1 and inside and not any(site.startswith(f"{name}.") for site in covered):
            held = {each.name.removeprefix(f"{name}.").split(".")[0] for each in inside}
            if held == set(blocks._modules):
                whole[name or type(model).__name__] = inside[0]
    outermost = {name for name in whole if not any(name != other and name.startswith(f"{other}.") for other in whole)}
    return {name: each for name, each in whole.items() if name in outermost}


def _seen(finder: Finder, names: dict[nn.Module, str]) -> Iterator[LeftOut]:
    for sighting in finder.sightings:
        seen = f"softmax of {sighting.rank} dimensions"
        name = names.get(sighting.place.module, type(sighting.place.module).__name__)
        if sighting.reading is None:
            yield LeftOut(name, seen, NO_PRODUCTS, is_attention=False)
        elif not sighting.weighted:
            yield LeftOut(name, seen, NO_VALUES, is_attention=False)
    for call in finder.hidden:
        yield LeftOut(names.get(call.module, type(call.module).__name__), "attention", NOT_SOFTMAX)


def _named(finder: Finder, model: nn.Module) -> Iterator[LeftOut]:
    """Modules that are called attention, in and around which none was found."""
    busy = {call.module for sighting in finder.sightings if sighting.reading is not None for call in sighting.running}
    busy |= {call.module for call in finder.hidden}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        if module in inside or module in busy or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            if module in busy and not any(child in busy for child in module.modules() if child is not module):
                inside.update(module.modules())
            continue
        called_so = _NAMED.search(type(module).__name__) or _NAMED.search(own)
        if called_so and not (_PART.search(type(module).__name__) or _PART.search(own)) and _projects(module):
            inside.update(module.modules())
            run = any(each in finder.called for each in module.modules())
            yield LeftOut(name, type(module).__name__, UNSEEN if run else NOT_RUN)


def _projects(module: nn.Module) -> bool:
    """Whether it holds at least the projections that attention takes."""
    return sum(parameter.dim() >= 2 for parameter in module.parameters()) >= 2
