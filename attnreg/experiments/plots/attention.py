"""One sample's attention: weights, attribution, candidate region, dropped positions (AD-DROP's Figure 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attnreg
from attnreg import functional
from attnreg.attribution import explain
from attnreg.experiments.plots.style import picture
from attnreg.masks import AttentionSite, Mask
from attnreg.provider.base import MaskProvider


class _Watched(MaskProvider):
    """Passes on what a provider answers at one site, and keeps it."""

    def __init__(self, provider: MaskProvider) -> None:
        super().__init__()
        self.provider = provider
        self.label = ""
        self.site: AttentionSite | None = None
        self.mask: Mask | None = None

    def forward(self, site: AttentionSite) -> Mask | None:
        mask: Mask | None = self.provider(site)
        if site.label == self.label:
            self.site, self.mask = site, mask
        return mask


def plot_attention(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    tokens: Sequence[str],
    provider: MaskProvider,
    path: Path,
    *,
    layer: int = 0,
    head: int | None = None,
) -> None:
    """Draw what a provider does to one sample.

    Args:
        model: the model; nothing is attached to it.
        batch: one row of its inputs, ``labels`` among them.
        tokens: the row's tokens.
        provider: an :class:`attnreg.AttributionProvider` is drawn with its attributions and candidate region.
        path: where to save.
        layer: which layer.
        head: which head; by default the one with the most attribution, or the first.
    """
    watched = _Watched(provider.train())
    with attnreg.attach(model, watched) as handle, torch.random.fork_rng():
        torch.manual_seed(0)  # the same picture each time
        label = next(site.label for site in handle.sites if site.layer == layer)
        watched.label = label
        attention = explain(model, batch, handle, [label], method="attention")[label][0]
        watched.attribute(model, batch)
        was_training = model.training
        with torch.no_grad(), handle.probing():
            model.train()(**batch)
        model.train(was_training)
    attributions = getattr(provider, "attributions", {}).get(label)
    shape = attention.shape
    if head is None:
        head = 0 if attributions is None else int(attributions[0].abs().sum((1, 2)).argmax())
    panels: list[tuple[str, Tensor, str]] = [("attention", attention[head], "Greys")]
    if isinstance(provider, attnreg.AttributionProvider) and attributions is not None and watched.site is not None:
        region = functional.candidate_region(attributions, watched.site.valid, provider.p, provider.region)
        by_row = attributions[0, head] / attributions[0, head].abs().amax(-1, keepdim=True).clamp(min=1e-30)
        panels.append(
            (f"attribution by {provider.method.replace('_', ' ')}, each row on its own scale", by_row, "PuOr")
        )
        panels.append((f"candidate region, p = {provider.p:g}", region[0, head], "Greys"))
    kept = None if watched.mask is None else watched.mask.units_kept
    kept = torch.ones((), dtype=torch.bool) if kept is None else kept
    panels.append(("dropped", ~kept.expand(1, *shape)[0, head], "Greys"))
    with picture(path, width=1.2 + 3.6 * len(panels), height=4.4, columns=len(panels)) as grid:
        for number, (axes, (title, values, colors)) in enumerate(zip(grid, panels, strict=True)):
            _matrix(axes, values, colors, tokens, title, with_rows=number == 0)
        grid[0].set_ylabel(f"query (layer {layer}, head {head})")


def _matrix(axes: Any, values: Tensor, colors: str, tokens: Sequence[str], title: str, *, with_rows: bool) -> None:
    shown = values.float().cpu().numpy()
    if values.dtype == torch.bool:
        axes.imshow(shown, cmap=colors, vmin=0, vmax=1.2)
    elif colors == "PuOr":
        limit = float(abs(shown).max()) or 1.0
        image = axes.imshow(shown, cmap=colors, vmin=-limit, vmax=limit)  # signed: 0 is white
        axes.figure.colorbar(image, ax=axes, shrink=0.6, ticks=[-limit, 0, limit])
    else:
        axes.figure.colorbar(axes.imshow(shown, cmap=colors, vmin=0), ax=axes, shrink=0.6)
    axes.set_title(title)
    axes.set_xticks(range(len(tokens)), tokens, rotation=90)
    axes.set_yticks(range(len(tokens)), tokens if with_rows else [])
    axes.set_xticks([n - 0.5 for n in range(1, len(tokens))], minor=True)
    axes.set_yticks([n - 0.5 for n in range(1, len(tokens))], minor=True)
    axes.grid(which="minor", color="#e0e0e0", lw=0.4)
    axes.tick_params(which="minor", length=0)
