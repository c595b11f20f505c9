"""Choose the attention and hidden-state sites at which a provider acts."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import get_args

from torch import Tensor, nn

from attnreg.errors import AttnRegWarning, CoverageWarning, InputError, NoAttentionError, listed
from attnreg.injection.discovery import Discovery, ModelSite
from attnreg.injection.discovery.coverage import NOT_RUN, stack_left_out
from attnreg.injection.discovery.hidden import HiddenModelSite
from attnreg.regularizer.base import Regularizer
from attnreg.regularizer.providers import HiddenProvider
from attnreg.sites import HiddenInfo, Site, Stack, Where, layer_indices, on_layers

A_BLOCK = "A block is an entry of a ModuleList or Sequential, around attention, that keeps the shape of hidden states."
WHY: dict[Where, str] = {
    "embeddings": "They enter the first block of a list of blocks, and count as its layer.",
    "pooled": "It is the one vector per sample that the last linear layer of the model takes, as in a classifier on "
    "the first token; it counts as the last layer.",
}


def choose(
    discovery: Discovery,
    layers: Sequence[int] | None = None,
    stacks: Sequence[Stack] | None = None,
    modules: str | Sequence[str] | None = None,
) -> list[ModelSite]:
    """Return the sites on these layers, in these stacks and modules; by default all self-attention."""
    for name, wanted in (("layers", layers), ("stacks", stacks)):
        if wanted is not None and (isinstance(wanted, str) or not isinstance(wanted, Collection) or not len(wanted)):
            write = f": write [{wanted!r}]" if isinstance(wanted, (int, str)) else ""
            raise InputError(f"Expected `{name}` to be a non-empty list, or None for all, got {wanted!r}{write}.")
    present = sorted({site.info.stack for site in discovery.sites})
    if missing := [stack for stack in stacks or () if stack not in present]:
        raise InputError(f"Expected `stacks` among those of the model, {present}, got {missing}.")
    if modules is not None:
        _check_patterns([modules] if isinstance(modules, str) else list(modules), discovery.sites)
    elif stacks is None:
        stacks = [stack for stack in get_args(Stack) if stack != "cross"]
    sites = [site for site in discovery.sites if is_chosen(site.info, None, stacks, modules)]
    if not sites:
        rest = next((f" (left out: {omission})" for omission in discovery.left_out if omission.is_attention), "")
        raise InputError(f"No attention is selected{rest}; the default is self-attention. Pass `stacks={present}`.")
    if layers is None:
        return sites
    where = "`attach(layers=...)`"
    on_layers([site.info for site in sites], layer_indices(layers, where), where)  # raises if a layer has no site
    return [site for site in sites if site.info.is_among(layers)]


def choose_hidden(
    provider: Regularizer, candidates: Sequence[HiddenModelSite], chosen: Sequence[ModelSite], model: nn.Module
) -> list[HiddenModelSite]:
    """Return the hidden-state sites, among candidates on the chosen layers, at which a part of the provider acts."""
    acting = {site.info: _acting_at(provider, site.info) for site in candidates}
    for part in provider.parts():
        for where in part.places if isinstance(part, HiddenProvider) else ():
            if any(info.where == where and part in parts for info, parts in acting.items()):
                continue
            present = ", ".join(dict.fromkeys(info.label for info in acting)) or "none"
            raise InputError(
                f"{type(part).__name__} acts on {where!r}, but {type(model).__name__} has no such hidden states on the "
                f"chosen layers (found: {present}). {WHY.get(where, A_BLOCK)}"
            )
    sites = [site for site in candidates if acting[site.info]]
    if any(site.info.where != "pooled" for site in sites):
        check_blocks("A provider of hidden states", chosen)
    for site in sites:
        if not site.axes:
            raise InputError(
                f"The hidden states of {site.info.name} have the shape {site.call.shape}, and it is not known which "
                "dimensions are samples and tokens: expected (B, T, C) or (T, B, C)."
            )
    return sites


def _acting_at(provider: Regularizer, site: HiddenInfo) -> list[Regularizer]:
    """Return the regularizers of hidden states, among a provider and its parts, that act at a site."""
    parts = [part for inner in provider.inner(site) for part in _acting_at(inner, site)]
    return [*parts, provider] if isinstance(provider, HiddenProvider) and site.where in provider.places else parts


def check_blocks(who: str, chosen: Sequence[ModelSite]) -> None:
    """Raise if a chosen self-attention has no block around it; ``who`` needs blocks, and begins the message."""
    without = [site.info.name for site in chosen if site.block is None and site.info.stack != "cross"]
    if without:
        raise InputError(
            f"{who} needs every self-attention to be inside a Transformer block, but there is none around "
            f"{', '.join(without)}: choose others with `modules=...` or `layers=...`. {A_BLOCK}"
        )


def is_chosen(
    site: Site,
    layers: Sequence[int] | None = None,
    stacks: Sequence[Stack] | None = None,
    modules: str | Sequence[str] | None = None,
) -> bool:
    """Whether attention, or a block without attention, is on these layers, in these stacks and modules."""
    patterns = [modules] if isinstance(modules, str) else modules
    return (
        (stacks is None or site.stack in stacks)
        and (layers is None or site.is_among(layers))
        and (patterns is None or any(_matches(site.name, pattern) for pattern in patterns))
    )


def warn_of_left_out(model: nn.Module, discovery: Discovery, *, everything: bool) -> None:
    """Warn of attention that is left out; with ``everything``, raise if none in a list of blocks can be masked."""
    covered = {site.info.name for site in discovery.sites}
    if everything and (stack := stack_left_out(discovery.left_out, model, covered)) is not None:
        name, example = stack
        raise NoAttentionError(
            f"All attention in {name} would be left out, for example {example}. If this is right, choose what to mask "
            "with `modules=...`."
        )
    rest = [omission for omission in discovery.left_out if omission.is_attention]
    if rest:
        examples = "; ".join(map(str, rest[:3])) + ("; ..." if len(rest) > 3 else "")
        is_unrun = any(omission.reason == NOT_RUN for omission in rest)
        remedy = "To mask what did not run, pass `example_inputs` that run it. " if is_unrun else ""
        warnings.warn(
            f"Attention is not masked in {len(rest)} module(s) of {type(model).__name__}: {examples}. All are listed "
            f"in `handle.left_out`. {remedy}To silence this warning, choose what to mask with `modules=...`.",
            CoverageWarning,
            stacklevel=3,
        )


def warn_of_sequences(model: nn.Module, discovery: Discovery) -> None:
    """Warn if several attentions share a module that runs on several sequences in the same pass."""
    first: dict[nn.Module, ModelSite] = {}
    again = [site for site in discovery.sites if site.begins_again(first.setdefault(site.module, site))]
    shared = [next(call.module for call in site.attention.running if call.is_repeated) for site in again]
    if several := [module for module in shared if shared.count(module) > 1]:
        name = discovery.names[several[0]]
        warnings.warn(
            f"In a pass of {type(model).__name__}, {name} runs on several sequences: its layers count on, and what is "
            f"decided per pass is the same for all. To regularize them separately, attach to `{name}` instead.",
            AttnRegWarning,
            stacklevel=3,
        )


def warn_of_heads(model: nn.Module, discovery: Discovery) -> None:
    """Warn if heads are modules of their own, entries of a list that attend to the same input: each is a layer."""
    first: dict[tuple[str, int], nn.Module] = {}
    for site in discovery.sites:
        entry = next((call for call in reversed(site.attention.running) if call.is_entry), None)
        if site.info.heads != 1 or entry is None or not isinstance(entry.states, Tensor):
            continue
        path = discovery.names[entry.module].rpartition(".")[0]
        other = first.setdefault((path, id(entry.states)), entry.module)
        if other is not entry.module:
            warnings.warn(
                f"In {type(model).__name__}, {discovery.names[other]} and {discovery.names[entry.module]} are heads of "
                "one attention, but each counts as a layer, in `layers=...` and in what depends on depth. To choose "
                "blocks, and to silence this warning, pass `modules=...`.",
                AttnRegWarning,
                stacklevel=3,
            )
            return


def _check_patterns(patterns: Sequence[str], sites: Sequence[ModelSite]) -> None:
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"Expected `modules` to be a name or pattern, or a list of them, got {list(patterns)!r}.")
    for pattern in patterns:
        if not any(_matches(site.info.name, pattern) for site in sites):
            raise InputError(
                f"No attention is in modules that match {pattern!r}. Modules with attention: "
                f"{listed([site.info.name for site in sites], 6)}."
            )


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern + suffix) for suffix in ("", ".*", "#*", "@*"))
