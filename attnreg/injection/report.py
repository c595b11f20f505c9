"""The table that :meth:`AttachHandle.report` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from attnreg.sites import Site


def report(sites: Iterable[Site], modules: Mapping[str, nn.Module], rates: Mapping[str, float]) -> str:
    """Return a table with a row per site: label, mean drop rate so far, the model's own dropout, module.

    Example:
        >>> attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        >>> print(report([Site(name="layer.0")], {"layer.0": attention}, {"encoder.0": 0.25}))
        site       drop rate  own dropout  module
        encoder.0      0.250  dropout=0.1  layer.0
    """
    rows = [("site", "drop rate", "own dropout", "module")]
    for site in sites:
        rate = f"{rates[site.label]:.3f}" if site.label in rates else "none yet"
        own = ", ".join(f"{name}={p:g}" for name, p in _dropouts(modules[site.name]).items()) or "none"
        rows.append((site.label, rate, own, site.name))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}" for a, b, c, d in rows]
    return "\n".join(lines)


def _dropouts(module: nn.Module) -> dict[str, float]:
    """Return the dropout probabilities of a module that are not 0, by attribute name."""
    plain = {name: value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)}
    inside = {name: child.p for name, child in module.named_modules() if isinstance(child, nn.Dropout)}
    return {name: p for name, p in {**plain, **inside}.items() if p > 0}
