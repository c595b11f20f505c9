"""Find the attention of a model that is left out, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from torch import nn

from attnreg.injection.discovery.blocks import may_hold_blocks
from attnreg.injection.discovery.finder import Finder

_NAMED = re.compile(r"att(entio)?n", re.IGNORECASE)
_PART = re.compile(r"dropout|norm|mask|bias|embed|rotary|output|intermediate|pos(ition)?_|project", re.IGNORECASE)

SEEN = (
    "attnreg sees softmax, F.scaled_dot_product_attention, nn.MultiheadAttention and flex_attention, but not other "
    "kernels such as flash attention"
)
NO_PRODUCTS = "its scores are not products of queries and keys"
NO_VALUES = "its weights are not multiplied by values"
SHUFFLED = "its queries are ordered differently from its keys"
OVER_ALL_SCORES = "it is taken over all scores, so it still counts dropped positions"
NOT_SOFTMAX = "its weights come from a function that cannot be masked, such as log_softmax, sigmoid or a compiled one"
UNSEEN = "no softmax or fused attention was seen in it"
NOT_CHOSEN = "it is not selected by `stacks`, `layers` or `modules`"
NOT_RUN = "it did not run on the example inputs"


@dataclass(frozen=True)
class LeftOut:
    """Something in a model that :func:`attnreg.attach` does not mask."""

    name: str  #: name of the module
    seen: str  #: what was seen there
    reason: str  #: why it is left out
    is_attention: bool = True  #: whether it is attention, or has a name like attention

    def __str__(self) -> str:
        return f"{self.name} ({self.seen}: {self.reason})"


def left_out(finder: Finder) -> tuple[LeftOut, ...]:
    """List what a dry run has seen besides the attention that can be masked."""
    return tuple(dict.fromkeys((*_seen(finder), *_named(finder))))


def why_hidden(model: nn.Module) -> str:
    """Explain why attention may be hidden in a model, and what to do."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if getattr(model, "_supports_sdpa", False) and chosen not in ("sdpa", "eager", None):
        return f'{SEEN}. Call `model.set_attn_implementation("sdpa")`; it is now {chosen!r}.'
    return f"{SEEN}."


def stack_left_out(left: Sequence[LeftOut], model: nn.Module, covered: Set[str]) -> tuple[str, LeftOut] | None:
    """Return the name of a list of blocks whose attention is all left out, and an example; ``None`` if there is none.

    ``left`` is what is left out, ``covered`` are the names of the attention sites. Lists of which no
    block ran do not count: texts do not run the vision tower of a model of text and images.
    """
    attention = [omission for omission in left if omission.is_attention]
    for name, blocks in model.named_modules():  # the outermost lists come first
        if not may_hold_blocks(blocks):
            continue
        inside = [omission for omission in attention if omission.name.startswith(f"{name}." if name else "")]
        if len(blocks._modules) > 1 and inside and not any(site.startswith(f"{name}.") for site in covered):
            keys = {omission.name.removeprefix(f"{name}.").split(".")[0] for omission in inside}
            hidden = [omission for omission in inside if omission.reason != NOT_RUN]
            if hidden and keys == set(blocks._modules):
                return name or type(model).__name__, hidden[0]
    return None


def _seen(finder: Finder) -> Iterator[LeftOut]:
    names = finder.names
    masked = {attention.caller.module for attention in finder.attentions if attention.is_attention}
    for attention in finder.attentions:
        module = attention.caller.module
        name = names[module]
        named = module not in masked and _is_called_attention(module, name)
        if not attention.is_attention:
            shuffled = attention.structure is not None and not attention.structure.same_order
            reason = SHUFFLED if shuffled else NO_PRODUCTS if attention.structure is None else NO_VALUES
            yield LeftOut(name, f"softmax of {attention.rank} dimensions", reason, is_attention=named or shuffled)
    for running in finder.other_weights:
        yield LeftOut(names[running[-1].module], "attention", NOT_SOFTMAX)
    for running in finder.logsumexps:
        yield LeftOut(names[running[-1].module], "logsumexp", OVER_ALL_SCORES)


def _named(finder: Finder) -> Iterator[LeftOut]:
    """Yield modules with a name like attention, if no attention was seen in or around them."""
    seen = [attention.running for attention in finder.attentions]
    seen += finder.other_weights
    innermost = {running[-1].module for running in seen}
    around = {call.module for running in seen for call in running}
    waiting = [("", finder.model)]
    while waiting:
        name, module = waiting.pop()
        if module in innermost:
            continue
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if module not in around and not is_list and _is_called_attention(module, name):
            if sum(parameter.dim() >= 2 for parameter in module.parameters()) >= 2:  # such as projections
                run = any(part in finder.called for part in module.modules())
                yield LeftOut(name or type(module).__name__, type(module).__name__, UNSEEN if run else NOT_RUN)
            continue
        children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
        waiting += reversed(children)


def _is_called_attention(module: nn.Module, path: str) -> bool:
    names = type(module).__name__, path.rpartition(".")[2]
    return any(_NAMED.search(name) for name in names) and not any(_PART.search(name) for name in names)
