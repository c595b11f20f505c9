"""Blocks of a report, and their rendering as Markdown and as one self-contained HTML file."""

from __future__ import annotations

import base64
import csv
import html
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnreg._files import replaced_file
from attnreg.experiments.results.plots.style import dark_path

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --line: #ddd; --strong: #888; --code: #f3f3f3; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ebebeb; --page: #171717; --line: #444; --strong: #777; --code: #262626; }
  a { color: #8ab4f8; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } table { font-size: .9em; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .45rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
.text { text-align: left; white-space: normal; min-width: 8em; } .long { min-width: 22em; }
th { border-bottom: 2px solid var(--strong); } .word { white-space: nowrap; }
figure { margin: 1rem 0; } img { max-width: 100%; }
pre { background: var(--code); padding: .6rem; white-space: pre-wrap; }
"""

_LONG = 40  # letters; a column with more in a cell is wider on a narrow screen


@dataclass(frozen=True)
class Heading:
    """A heading; the first heading is the title."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str


@dataclass(frozen=True)
class Code:
    """A code block: lines to type in a shell."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        header: column names.
        rows: the cells.
        texts: indices of the text columns, aligned left; other columns are numbers, aligned right.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Collection[int] = (0,)

    def align(self, column: int, left: str, right: str) -> str:
        """Return ``left`` for a text column and ``right`` for a column of numbers."""
        return left if column in self.texts else right


@dataclass(frozen=True)
class Picture:
    """A PNG file with a caption."""

    path: Path
    caption: str

    @property
    def dark(self) -> Path | None:
        """Its version for dark pages, if any."""
        return path if (path := dark_path(self.path)).is_file() else None


@dataclass(frozen=True)
class Contents:
    """A list of links to all headings but the title."""


@dataclass(frozen=True)
class Reports:
    """A list of links to other reports, by name; each is a folder with ``report.md`` and ``report.html``."""

    folders: Mapping[str, Path]


Block = Heading | Paragraph | Code | Table | Picture | Contents | Reports


def save(blocks: Sequence[Block], folder: Path) -> None:
    """Write ``report.md`` and ``report.html`` in a folder."""
    for suffix, content in {"md": markdown(blocks, folder), "html": self_contained_html(blocks)}.items():
        with replaced_file(folder / f"report.{suffix}") as file:
            file.write(content)


def save_csv(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows as a CSV file; what a row lacks is empty."""
    with replaced_file(path) as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    r"""Render blocks as Markdown; picture links are relative to ``folder``.

    Example:
        >>> print(markdown([Heading("A"), Table(["m", "x"], [["a|b", "1"]])], Path(".")))
        # A
        <BLANKLINE>
        | m | x |
        | --- | ---: |
        | a\|b | 1 |
        <BLANKLINE>
    """
    parts = []
    for number, block in enumerate(blocks):
        if isinstance(block, Heading):
            parts.append(f"{'##' if number else '#'} {block.text}")
        elif isinstance(block, Paragraph):
            parts.append(block.text)
        elif isinstance(block, Contents):
            parts.append("\n".join(f"- [{text}](#{_anchor(text)})" for text in _chapters(blocks)))
        elif isinstance(block, Reports):
            links = [
                f"- [{name}]({each.relative_to(folder).as_posix()}/report.md)" for name, each in block.folders.items()
            ]
            parts.append("\n".join(links))
        elif isinstance(block, Code):
            parts.append("\n".join(["```", *block.lines, "```"]))
        elif isinstance(block, Picture):
            parts.append(f"![{block.caption}]({block.path.relative_to(folder).as_posix()})\n\n*{block.caption}*")
        else:
            rule = [block.align(column, "---", "---:") for column in range(len(block.header))]
            cells = [block.header, rule, *block.rows]
            parts.append("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells))
    return "\n\n".join(parts) + "\n"


def self_contained_html(blocks: Sequence[Block]) -> str:
    """Render blocks as one HTML page with embedded pictures."""
    body = []
    title = html.escape(next(block.text for block in blocks if isinstance(block, Heading)))
    for number, block in enumerate(blocks):
        if isinstance(block, Heading):
            tags = (f'h2 id="{_anchor(block.text)}"', "h2") if number else ("h1", "h1")
            body.append(f"<{tags[0]}>{_text(block.text)}</{tags[1]}>")
        elif isinstance(block, Contents):
            links = (f'<li><a href="#{_anchor(text)}">{_text(text)}</a></li>' for text in _chapters(blocks))
            body.append(f"<nav><ul>{''.join(links)}</ul></nav>")
        elif isinstance(block, Reports):
            links = (
                f'<li><a href="{html.escape(each.name)}/report.html">{html.escape(name)}</a></li>'
                for name, each in block.folders.items()
            )
            body.append(f"<ul>{''.join(links)}</ul>")
        elif isinstance(block, Paragraph):
            body.append(f"<p>{_text(block.text)}</p>")
        elif isinstance(block, Code):
            body.append("<pre>" + _text("\n".join(block.lines)) + "</pre>")
        elif isinstance(block, Picture):
            caption = html.escape(block.caption)
            image = f'<img alt="{caption}" src="{_embedded(block.path)}">'
            if block.dark is not None:
                source = f'<source srcset="{_embedded(block.dark)}" media="(prefers-color-scheme: dark)">'
                image = f"<picture>{source}{image}</picture>"
            body.append(f"<figure>{image}<figcaption>{_text(block.caption)}</figcaption></figure>")
        else:
            lines = "".join(
                _row(block, tag, row) for tag, row in [("th", block.header), *(("td", r) for r in block.rows)]
            )
            body.append(f'<div class="wide"><table>{lines}</table></div>')
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _chapters(blocks: Sequence[Block]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, Heading)][1:]


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub forms it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _embedded(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _text(text: str) -> str:
    """Escape a text; lines do not end within its options and hyphenated words.

    Example:
        >>> _text("ad-drop --p <1")
        '<span class="word">ad-drop</span> <span class="word">--p</span> &lt;1'
    """
    return re.sub(r"[\w-]*-[\w-]+", r'<span class="word">\g<0></span>', html.escape(text))


def _row(table: Table, tag: str, cells: Sequence[str]) -> str:
    written = []
    for column, cell in enumerate(cells):
        long = " long" if len(cell) > _LONG else ""
        kind = table.align(column, f' class="text{long}"', "")
        written.append(f"<{tag}{kind}>{_text(cell) if kind else html.escape(cell)}</{tag}>")
    return f"<tr>{''.join(written)}</tr>"
