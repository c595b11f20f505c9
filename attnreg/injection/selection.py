"""Which attention of a model a provider is asked about."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import get_args

from torch import nn

from attnreg.errors import InputError
from attnreg.injection.discovery import Discovery, FoundSite
from attnreg.injection.discovery.coverage import stacks_left_out
from attnreg.injection.errors import CoverageWarning, NoAttentionError
from attnreg.masks import Stack, layer_indices, on_layers


def choose(
    found: Discovery,
    layers: Sequence[int] | None = None,
    stacks: Sequence[Stack] | None = None,
    modules: str | Sequence[str] | None = None,
) -> list[FoundSite]:
    """The sites on some layers, of some stacks and in some modules; by default every self-attention.

    Raises:
        InputError: if something that is asked for is not there.
    """
    for name, wanted in (("layers", layers), ("stacks", stacks)):
        if wanted is not None and (isinstance(wanted, (str, int)) or not len(wanted)):
            raise InputError(f"Expected `{name}` to be a list that is not empty, or None for all, got {wanted!r}.")
    sites = list(found.sites)
    present = sorted({site.info.stack for site in sites})
    if missing := [stack for stack in stacks or () if stack not in present]:
        raise InputError(f"Expected `stacks` among {present}, which the model has, got {missing}.")
    if modules is not None:
        sites = _in_modules(sites, [modules] if isinstance(modules, str) else list(modules))
    elif stacks is None:
        stacks = [stack for stack in get_args(Stack) if stack != "cross"]
    sites = [site for site in sites if stacks is None or site.info.stack in stacks]
    if not sites:
        rest = next((f", but for what is left out, such as {each}" for each in found.left_out if each.is_attention), "")
        raise InputError(f"The model has no self-attention, only {', '.join(present)}{rest}: pass `stacks={present}`.")
    if layers is None:
        return sites
    where = "`attach(layers=...)`"
    names = {info.name for info in on_layers([site.info for site in sites], layer_indices(layers, where), where)}
    return [site for site in sites if site.info.name in names]


def warn_of_the_rest(model: nn.Module, found: Discovery, *, everything: bool) -> None:
    """Say what attention of a model is not covered, though nobody asked to leave it out.

    Args:
        model: the model.
        found: in it.
        everything: whether all self-attention was asked for.

    Raises:
        NoAttentionError: if so, and a whole list of blocks would be left out.
    """
    whole = stacks_left_out(found.left_out, model, {site.info.name for site in found.sites})
    if everything and whole:
        name, example = next(iter(whole.items()))
        raise NoAttentionError(
            f"All of {name} would be left out, for example {example}. Pass `example_inputs` with which its attention "
            "is seen, or choose what to cover with `modules=...`."
        )
    rest = [each for each in found.left_out if each.is_attention]
    if rest:
        listed = "; ".join(str(each) for each in rest[:3]) + ("; ..." if len(rest) > 3 else "")
        warnings.warn(
            f"Attention in {len(rest)} modules of {type(model).__name__} is not covered, see `handle.left_out`: "
            f"{listed}. Choose what to cover with `modules=...` to say that this is meant.",
            CoverageWarning,
            stacklevel=3,
        )


def _in_modules(sites: Sequence[FoundSite], patterns: Sequence[str]) -> list[FoundSite]:
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"Expected `modules` to be a name or pattern, or a list of them, got {list(patterns)!r}.")
    for pattern in patterns:
        if not any(_matches(site, pattern) for site in sites):
            raise InputError(
                f"No attention of the model is in modules called {pattern!r}; there are "
                f"{', '.join(site.info.name for site in sites[:6])}{', ...' if len(sites) > 6 else ''}."
            )
    return [site for site in sites if any(_matches(site, pattern) for pattern in patterns)]


def _matches(site: FoundSite, pattern: str) -> bool:
    name = site.info.name
    return any(fnmatchcase(name, each) for each in (pattern, f"{pattern}.*", f"{pattern}#*", f"{pattern}@*"))
