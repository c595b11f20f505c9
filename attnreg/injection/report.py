"""Tables that a notebook shows as HTML: what ``handle.report()`` returns."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn
from typing_extensions import Self

from attnreg.sites import Site


class Report(str):
    """A table with sentences below, which a notebook shows as HTML."""

    __slots__ = ("notes", "rows")

    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[str]], notes: Sequence[str], right: Collection[int] = ()) -> Self:
        """Make a report of rows, the first of which is the header; ``right`` has the columns to align so."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        columns = [f"{'>' if number in right else '<'}{width}" for number, width in enumerate(widths)]
        shown = ([*map(format, cells, columns), last] for *cells, last in rows)
        lines = ["  ".join(cells).rstrip() for cells in shown]
        made = cls("\n".join([*lines, *notes]))
        made.rows, made.notes = rows, notes
        return made

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head, *body = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            for row, tag in zip(self.rows, ["th", *["td"] * len(self.rows)], strict=False)
        )
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}"


def site_report(
    sites: Iterable[Site], modules: Mapping[str, nn.Module], rates: Mapping[str, float], notes: Sequence[str] = ()
) -> Report:
    """Return a table with a row per site, given their modules by name and their rates by label.

    Its columns are the site's label, the mean drop rate so far, the model's own dropout, and the module. Below it are
    sentences on regularizers that drop nothing by design, and why no pass was masked yet.

    Example:
        >>> attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        >>> site_report([Site(name="layer.0")], {"layer.0": attention}, {"encoder.0": 0.25})
        site       drop rate  own dropout  module
        encoder.0      0.250  dropout=0.1  layer.0
    """
    rows = [("site", "drop rate", "own dropout", "module")]
    for site in sites:
        rate = f"{rates[site.label]:.3f}" if site.label in rates else "none yet"
        own = ", ".join(f"{name}={p:g}" for name, p in _dropouts(modules[site.name]).items()) or "none"
        rows.append((site.label, rate, own, site.name))
    return Report.of_rows(rows, notes, right=[1])


def _dropouts(module: nn.Module) -> dict[str, float]:
    """Return the dropout probabilities of a module that are not 0, by attribute name."""
    plain = {name: value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)}
    inside = {name: child.p for name, child in module.named_modules() if isinstance(child, nn.Dropout)}
    return {name: p for name, p in {**plain, **inside}.items() if p > 0}
