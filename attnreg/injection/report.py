"""Tables as text, with their rows: what ``handle.report()`` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from typing_extensions import Self

from attnreg.sites import Site


class Report(str):
    """A table with sentences below, which is its own ``repr``."""

    __slots__ = ("notes", "rows")

    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Self:
        """Make a report of rows, the first of which is the header."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        made = cls("\n".join([*lines, *notes]))
        made.rows, made.notes = rows, notes
        return made

    def __repr__(self) -> str:
        return str(self)


def site_report(sites: Iterable[Site], rates: Mapping[str, float], notes: Sequence[str] = ()) -> Report:
    """Return a table with a row per site: its label, its mean drop rate so far, by label in ``rates``, and its module.

    Below it are sentences on regularizers that drop nothing by design, and why no pass was masked yet.
    """
    shown = {label: f"{rate:.3f}" for label, rate in rates.items()}
    rows = [(site.label, shown.get(site.label, "none yet"), site.name) for site in sites]
    return Report.of_rows([("site", "drop rate", "module"), *rows], notes)
