"""Plot the score of a network while attention positions are dropped at evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnreg.experiments.results.plots.style import COLORS, picture, styles

Point = tuple[float, float, float]


def plot_probe(lines: Mapping[str, Sequence[Point]], plain: float, score: str, path: Path) -> None:
    """Plot scores over the probability q of dropping a candidate, and over the share of attention that it drops.

    Args:
        lines: triples of q, share and score, by the name of the candidates.
        plain: score without dropping.
        score: name of the score.
        path: the PNG file to save.
    """
    with picture(path, width=9.6, height=3.8, columns=2) as both:
        for number, axes in enumerate(both):
            axes.axhline(plain, color=COLORS[0], lw=1.0, ls=":", label="nothing dropped")
            for (name, points), style in zip(lines.items(), itertools.islice(styles(), 1, None), strict=False):
                places, scores = [point[number] for point in points], [point[2] for point in points]
                axes.plot(places, scores, color=style.color, linestyle=style.line, marker=style.marker, ms=5, lw=1.6,
                          label=name)  # fmt: skip
            axes.grid(axis="y", color="#dddddd", lw=0.6)
        both[0].set(xlabel="probability q of dropping a candidate", ylabel=score.replace("_", " "))
        both[1].set(xlabel="share of attention dropped, mean over layers")
        both[1].sharey(both[0])
        both[1].legend(title="candidates", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
