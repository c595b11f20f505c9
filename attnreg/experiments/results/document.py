"""Blocks of a report: on the screen, as Markdown, and as one HTML page with its pictures."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import rich.table
from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console
from rich.text import Text

from attnreg._files import write_text
from attnreg.errors import InputError

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --line: #ddd; --strong: #888; --code: #f3f3f3; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ebebeb; --page: #171717; --line: #444; --strong: #777; --code: #262626; }
  a { color: #8ab4f8; } img { filter: invert(0.9) hue-rotate(180deg); }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { display: block; overflow-x: auto; font-size: .9em; border-collapse: collapse;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .45rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
:is(th, td):not([style]) { text-align: left; white-space: normal; min-width: 8em; }
th { border-bottom: 2px solid var(--strong); }
img { max-width: 100%; }
pre { background: var(--code); padding: .6rem; white-space: pre-wrap; }
"""

# What is a mark in a cell, whose texts may be users': not an underscore within a word, nor the brackets of an interval.
_MARKS = re.compile(r"[|`*~]|\\(?=[^\w\s]|_|$)|\](?=\()|<(?=[A-Za-z/!?])|&(?=[\w#])|(?<![^\W_])_|_(?![^\W_])")


class Heading(str):
    """A heading; the first heading is the title."""


class Paragraph(str):
    """A paragraph of text."""


class Code(str):
    """A code block: what to type in a shell."""


@dataclass(frozen=True)
class Table:
    """A table; the columns in ``texts`` are aligned left; the others are numbers, aligned right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Collection[int] = (0,)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], texts: Collection[int] = (0,)) -> Table:
        """Return a table of rows by column; a missing cell is "none"."""
        header = list(dict.fromkeys(column for row in rows for column in row))
        return cls(header, [[row.get(column, "none") for column in header] for row in rows], texts)


@dataclass(frozen=True)
class Picture:
    """A PNG file with a caption."""

    path: Path
    caption: str


class Contents:
    """A list of links to all headings but the title."""


Block = Heading | Paragraph | Code | Table | Picture | Contents


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    """Render blocks as Markdown; picture links are relative to ``folder``."""
    parts: list[str] = []
    for block in blocks:
        match block:
            case Heading():
                parts.append(f"{'##' if parts else '#'} {block}")
            case Paragraph():
                parts.append(block)
            case Code():
                parts.append(f"```\n{block}\n```")
            case Table():
                rule = ["---" if column in block.texts else "---:" for column in range(len(block.header))]
                lines = [[" ".join(cell.splitlines()) for cell in row] for row in (block.header, *block.rows)]
                cells = [[_MARKS.sub(r"\\\g<0>", line) for line in row] for row in lines]
                rows = [cells[0], rule, *cells[1:]]
                parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
            case Picture():
                parts.append(f"![{block.caption}]({block.path.relative_to(folder).as_posix()})\n\n*{block.caption}*")
            case Contents():
                _, *chapters = (part for part in blocks if isinstance(part, Heading))
                parts.append("\n".join(f"- [{chapter}](#{_anchor(chapter)})" for chapter in chapters))
    return "\n\n".join(parts) + "\n"


def html_page(text: str, folder: Path) -> str:
    """Render the Markdown of :func:`markdown` as one HTML page that embeds its pictures, inverted on dark screens."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("image", _image)
    tokens = parser.parse(text)
    for token, inside in pairwise(tokens):
        if token.type == "heading_open" and token.tag != "h1":
            token.attrSet("id", _anchor(inside.content))
        for link in (child for child in token.children or () if child.type == "link_open"):
            link.attrSet("href", re.sub(r"/report\.md$", "/report.html", str(link.attrs["href"])))
    title = next(inside.content for token, inside in pairwise(tokens) if token.type == "heading_open")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + str(parser.renderer.render(tokens, parser.options, {"folder": folder}))
        + "</body></html>\n"
    )


def print_table(console: Console, table: Table, title: str | None = None) -> None:
    """Print a table on the screen."""
    grid = rich.table.Table(title=title, title_justify="left")  # of `Text`, which has no markup in brackets
    for number, column in enumerate(table.header):  # folded, not cut to "…"
        grid.add_column(Text(column), justify="left" if number in table.texts else "right", overflow="fold")
    for row in table.rows:
        grid.add_row(*map(Text, row))
    console.print(grid)


def say(console: Console, *texts: str | Table) -> None:
    """Print texts, each as one unchanged line, and tables."""
    for text in texts:
        if isinstance(text, Table):
            print_table(console, text)
        else:
            console.print(text, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a duration, such as ``40 s`` or ``3 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def save(blocks: Sequence[Block], folder: Path) -> None:
    """Write ``report.md`` and ``report.html`` in a folder."""
    text = markdown(blocks, folder)
    for name, content in {"report.md": text, "report.html": html_page(text, folder)}.items():
        write_text(folder / name, content)


def with_predictions(row: Mapping[str, Any], predictions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its predictions; raise if it has a column of such a name."""
    if repeated := [name for name in predictions if name in row]:
        raise InputError(f"The rows have a column {repeated[0]!r}, which the predictions would have: rename it.")
    return {**row, **predictions}


def save_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows to a ``.jsonl`` or ``.csv`` file, with lists and objects as JSON; a missing value is empty."""
    if path.suffix == ".jsonl":
        write_text(path, "".join(_to_json(row) + "\n" for row in rows))
        return
    ends_lines = any(isinstance(value, str) and "\r" in value for row in rows for value in row.values())
    quoting: Any = csv.QUOTE_ALL if ends_lines else csv.QUOTE_MINIMAL  # which does not quote a lone carriage return
    writer = csv.writer(text := io.StringIO(), lineterminator="\n", quoting=quoting)
    writer.writerow(columns := list(dict.fromkeys(name for row in rows for name in row)))
    for row in rows:
        values = [row.get(name) for name in columns]
        writer.writerow([_to_json(value) if isinstance(value, (list, dict)) else value for value in values])
    write_text(path, text.getvalue())


def _to_json(value: object) -> str:
    """Return a value as JSON, which has no NaN and no infinite numbers: they are null."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return json.dumps(json.loads(text, parse_constant=lambda name: None), ensure_ascii=False)


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub forms it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _image(renderer: Any, tokens: Sequence[Token], number: int, options: Any, env: Any) -> str:
    picture = base64.b64encode((env["folder"] / str(tokens[number].attrs["src"])).read_bytes()).decode()
    return f'<img alt="{html.escape(tokens[number].content)}" src="data:image/png;base64,{picture}">'
