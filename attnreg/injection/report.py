"""The reports of a handle: tables of sites, drop rates, and the tokens of a sample with their dropped shares."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from attnreg.errors import InputError
from attnreg.masks import Mask
from attnreg.regularizer.abilities import effects
from attnreg.regularizer.base import Regularizer
from attnreg.sites import AttentionSite, HiddenSite, Site

_CELL = "padding: 0.1em 0.5em; text-align: left"
_TOKEN = '<span title="{}" style="background: rgba(213, 94, 0, {:.2f}); padding: 0 0.15em; margin: 0 0.05em">{}</span>'


class Report(str):
    """A text table with sentences below; a notebook shows it as an HTML table."""

    __slots__ = ("notes", "rows")

    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Self:
        """Make a report of rows, the first of which is the header."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        report = cls("\n".join([*lines, *notes]))
        report.rows, report.notes = rows, notes
        return report

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        header, *rows = self.rows
        head = "".join(f'<th style="{_CELL}">{html.escape(cell)}</th>' for cell in header)
        body = "".join(
            "<tr>" + "".join(f'<td style="{_CELL}">{html.escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


class Rates(dict[str, float]):
    """Drop rates by site; they are shown with four digits."""

    @override
    def __repr__(self) -> str:
        return f"{{{', '.join(f'{label!r}: {rate:.4f}' for label, rate in self.items())}}}"


class DroppedTokens(Report):
    """The tokens of a sample with their dropped shares: a table, and in a notebook the text, shaded."""

    __slots__ = ()

    @override
    def _repr_html_(self) -> str:
        _, *rows = self.rows
        labels = self.rows[0][2:]
        shown = []
        for token, share, *rates in rows:
            by_site = ", ".join(f"{label} {rate}" for label, rate in zip(labels, rates, strict=True))
            shown.append(_TOKEN.format(html.escape(f"{share}: {by_site}"), int(share[:-1]) / 100, html.escape(token)))
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f'<p style="line-height: 1.8">{" ".join(shown)}</p>{notes}'


def dropped_tokens(
    run: Callable[[], Any], provider: Regularizer, tokens: Sequence[str], row: int, seed: int
) -> DroppedTokens:
    """Return the share of every token of a row that a provider drops, in a pass that ``run`` makes with this seed."""
    shares, length = dict[str, Tensor](), len(tokens)

    def see(site: Site, before: Any, after: Any) -> None:
        if isinstance(site, AttentionSite) and site.shape[3] >= length:
            shares[site.label] = _dropped_shares(after, site, row)[:length]
        elif before is not None and before.dim() == 3 and before.shape[1] >= length and not torch.equal(after, before):
            shares[site.label] = ((after == 0) & (before != 0))[row, :length].float().mean(1).cpu()

    with watching(provider, see):
        run()
    if not shares:
        reason = "it masks no attention to them and no states of them, or is not active in this epoch"
        raise InputError(f"{type(provider).__name__} drops nothing of these {len(tokens)} tokens: {reason}.")
    table = torch.stack([*shares.values()])
    percent = [[f"{round(100 * float(rate))}%" for rate in rates] for rates in (table.mean(0), *table)]
    rows = [("token", "dropped", *shares), *zip(tokens, *percent, strict=True)]
    nothing = [] if table.any() else effects(provider) or ["They drop nothing of this sample: try another `seed`."]
    return DroppedTokens.of_rows(rows, [" ".join([f"Masks of seed {seed}.", *nothing])])


@contextmanager
def watching(provider: Regularizer, see: Callable[[Site, Any, Any], None]) -> Iterator[None]:
    """Call ``see`` with every result of a provider within the block: site, old states (or ``None``), mask or states."""
    mask_at, states_at = provider.mask_at, provider.states_at

    def watched_mask(site: AttentionSite) -> Mask | None:
        see(site, None, mask := mask_at(site))
        return mask

    def watched_states(site: HiddenSite, states: Tensor) -> Tensor:
        see(site, states, after := states_at(site, states))
        return after

    vars(provider).update(mask_at=watched_mask, states_at=watched_states)
    try:
        yield
    finally:
        del vars(provider)["mask_at"], vars(provider)["states_at"]


def _dropped_shares(mask: Mask | None, site: AttentionSite, row: int) -> Tensor:
    """Return for every key the share of its units, over heads and real queries, that a mask drops."""
    kept = None if mask is None else mask.units_kept
    if kept is None:
        return torch.zeros(site.shape[3])
    kept = kept.expand(site.shape)[row].cpu()
    units = torch.ones_like(kept) if site.units is None else site.units.expand(site.shape)[row].cpu()
    return (units & ~kept).sum((0, 1)) / units.sum((0, 1)).clamp(min=1)


def names_of(batch: Mapping[str, Tensor], row: int, tokenizer: Any) -> list[str]:
    """Return the tokens of a row without padding, as a tokenizer names them; without one, their numbers."""
    if "input_ids" not in batch:
        raise InputError("Expected a batch with `input_ids`, whose tokens can be shown.")
    ids = batch["input_ids"][row]
    if "attention_mask" in batch:
        real = batch["attention_mask"][row].bool()
        if not bool(real[: int(real.sum())].all()):
            raise InputError("Expected padding at the right, to show the tokens before it.")
        ids = ids[real]
    numbers = ids.tolist()
    return [*map(str, numbers)] if tokenizer is None else list(tokenizer.convert_ids_to_tokens(numbers))
