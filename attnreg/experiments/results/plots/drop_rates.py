"""Plot the drop rate of each layer over training (AttendOut, Figure 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnreg.experiments.folder.reader import RunReader
from attnreg.experiments.results.plots.style import count_axis, moving_mean, picture, sequence, styles


def plot_drop_rates(run: RunReader, path: Path) -> bool:
    """Plot the drop rate of each attention site; lines have gaps where the provider was not active.

    Returns:
        whether there was a drop rate to plot; otherwise no file is written.
    """
    sites = list(dict.fromkeys(site for line in run.telemetry for site in line["drop_rate"]))
    if not sites:
        return False
    window = max(1, len(run.telemetry) // 40)
    with picture(path, width=8.0) as (axes,):
        for site, color, style in zip(sites, sequence(len(sites)), styles(), strict=False):
            for part in _active_parts(run, site):
                steps, rates = [line["step"] for line in part], [line["drop_rate"][site] for line in part]
                mean = moving_mean(rates, window)
                axes.plot(steps, mean, linestyle=style.line, marker=style.marker, color=color, ms=4, lw=1.6,
                          markevery=max(1, len(steps) // 8), label=site)  # fmt: skip
        axes.set(xlabel="step", ylabel="drop rate", title=f"Drop rate per layer: {run.title}")
        axes.set_ylim(0, max(1.05 * axes.get_ylim()[1], 0.01))
        count_axis(axes)
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(named.values(), named.keys(), frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return True


def _active_parts(run: RunReader, site: str) -> list[list[dict[str, Any]]]:
    """Split the telemetry into consecutive parts in which a site has a drop rate."""
    parts: list[list[dict[str, Any]]] = [[]]
    for line in run.telemetry:
        if site in line["drop_rate"]:
            parts[-1].append(line)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]
