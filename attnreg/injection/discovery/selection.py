"""Choose which attention sites of a model to mask."""

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
from attnreg.sites import Site, Stack, layer_indices, on_layers


def choose(
    found: Discovery,
    layers: Sequence[int] | None = None,
    stacks: Sequence[Stack] | None = None,
    modules: str | Sequence[str] | None = None,
) -> list[FoundSite]:
    """Return the sites on the given layers, in the given stacks and modules; by default all self-attention."""
    for name, wanted in (("layers", layers), ("stacks", stacks)):
        if wanted is not None and (isinstance(wanted, (str, int)) or not len(wanted)):
            raise InputError(f"Expected `{name}` to be a non-empty list, or None for all, got {wanted!r}.")
    sites = list(found.sites)
    present = sorted({site.info.stack for site in sites})
    if missing := [stack for stack in stacks or () if stack not in present]:
        raise InputError(f"Expected `stacks` among those of the model, {present}, got {missing}.")
    if modules is not None:
        sites = _in_modules(sites, [modules] if isinstance(modules, str) else list(modules))
    elif stacks is None:
        stacks = [stack for stack in get_args(Stack) if stack != "cross"]
    sites = [site for site in sites if stacks is None or site.info.stack in stacks]
    if not sites:
        rest = next((f" (left out: {each})" for each in found.left_out if each.is_attention), "")
        raise InputError(f"No attention is selected{rest}; the default is self-attention. Pass `stacks={present}`.")
    if layers is None:
        return sites
    where = "`attach(layers=...)`"
    names = {info.name for info in on_layers([site.info for site in sites], layer_indices(layers, where), where)}
    return [site for site in sites if site.info.name in names]


def is_chosen(
    site: Site,
    layers: Sequence[int] | None = None,
    stacks: Sequence[Stack] | None = None,
    modules: str | Sequence[str] | None = None,
) -> bool:
    """Whether a block without attention is on the given layers, in the given stacks and modules."""
    patterns = [modules] if isinstance(modules, str) else modules
    return (
        (stacks is None or site.stack in stacks)
        and (layers is None or site.is_among(layers))
        and (patterns is None or any(_matches(site.name, pattern) for pattern in patterns))
    )


def warn_of_the_rest(model: nn.Module, found: Discovery, *, everything: bool) -> None:
    """Warn of attention that cannot be masked.

    Raises:
        NoAttentionError: if ``everything`` is to be masked, and all attention in a list of blocks would be left out.
    """
    whole = stacks_left_out(found.left_out, model, {site.info.name for site in found.sites})
    if everything and whole:
        name, example = next(iter(whole.items()))
        raise NoAttentionError(
            f"All attention in {name} would be left out, for example {example}. Pass `example_inputs` that run this "
            "attention, or choose what to mask with `modules=...`."
        )
    rest = [each for each in found.left_out if each.is_attention]
    if rest:
        listed = "; ".join(str(each) for each in rest[:3]) + ("; ..." if len(rest) > 3 else "")
        warnings.warn(
            f"Attention is not masked in {len(rest)} module(s) of {type(model).__name__}: {listed}. All are listed in "
            "`handle.left_out`. To silence this warning, choose what to mask with `modules=...`.",
            CoverageWarning,
            stacklevel=3,
        )


def _in_modules(sites: Sequence[FoundSite], patterns: Sequence[str]) -> list[FoundSite]:
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"Expected `modules` to be a name or pattern, or a list of them, got {list(patterns)!r}.")
    for pattern in patterns:
        if not any(_matches(site.info.name, pattern) for site in sites):
            raise InputError(
                f"No attention is in modules that match {pattern!r}. Modules with attention: "
                f"{', '.join(site.info.name for site in sites[:6])}{', ...' if len(sites) > 6 else ''}."
            )
    return [site for site in sites if any(_matches(site.info.name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(name, each) for each in (pattern, f"{pattern}.*", f"{pattern}#*", f"{pattern}@*"))
