"""Write all.csv, p in the tables of all pages, the board, and the first picture of the results.

Usage: python docs/results/overview.py
       python docs/results/overview.py --path FILE.png    # only the picture
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from published import FOLDER, Row, comparisons, write

from attnreg.experiments.compare.contrast import LEVEL, p_cell
from attnreg.experiments.compare.statistics import holm
from attnreg.experiments.results.plots.style import picture, styles

PAGE = FOLDER / "comparisons" / "README.md"
MARK = "<!-- {}: made by python docs/results/overview.py -->"
END = "<!-- end -->"
EXTENSION = {
    "": "",
    "prompted": "led to more seeds",
    "added": "added after a look",
    "pooled": "8 seeds and 12 added ones",
}
SAME = {
    "high": "AD-DROP",
    "every epoch": "AD-DROP in every epoch",
    "attention-dropout": "scores dropout",
}  # on the board
SAME |= {"random": "random masks", "low": "AD-DROP, lowest attributions", "attention": "AD-DROP, highest attention"}
# The first picture: study, data, rows, method and baselines of each row.
DRAWN = (
    ("AD-DROP, 500 rows of SST-2\n(phrases → sentences), 24 seeds", "mechanism", "sst2", 500, "high", (
        "plain", "plain for 15 epochs", "random", "low", "attention")),
    ("... 500 sentences of SST-2, each\narm tuned, 24 seeds, on test", "controls", "sst2_sentences", 500, "high", (
        "plain", "random", "low", "attention")),
    ("... 500 rows of CR, with these\nvalues, 12 seeds, on test", "replication", "cr", 500, "high", (
        "plain for 15 epochs", "plain", "random")),
    ("... 500 rows of Subj, with these\nvalues, 12 seeds, on test", "replication", "subj", 500, "high", (
        "plain for 15 epochs", "plain", "random")),
    ("... 500 rows of TREC, with these\nvalues, 12 seeds, on test", "replication", "trec", 500, "high", (
        "plain for 15 epochs", "plain", "random")),
    ("... 500 sentences of SST-2, where\nvalues were tuned, 12 fresh seeds", "replication", "sst2_sentences", 500,
        "high", ("plain for 15 epochs", "plain", "random")),
    ("... CR, Subj, TREC and SST-2\nsentences, pooled", "replication", "pooled", 500, "high", ("plain for 15 epochs",)),
    ("... 100 rows of CR, with these\nvalues, 12 seeds, on test", "replication", "cr", 100, "high", (
        "plain for 15 epochs", "plain", "random")),
    ("... 100 rows of Subj", "replication", "subj", 100, "high", ("plain for 15 epochs", "plain", "random")),
    ("... 100 rows of TREC", "replication", "trec", 100, "high", ("plain for 15 epochs", "plain", "random")),
    ("... 100 sentences of SST-2", "replication", "sst2_sentences", 100, "high", (
        "plain for 15 epochs", "plain", "random")),
    ("... 100 rows of each, pooled", "replication", "pooled", 100, "high", ("plain for 15 epochs",)),
    ("AD-DROP, 500 rows of TREC, other\nvalues, 12 seeds, on test", "ladder", "trec", 500, "AD-DROP", (
        "plain", "SetFit")),
    ("... from the first token", "ladder", "trec", 500, "AD-DROP from the first token", ("first token",)),
    ("AD-DROP on LP-FT, the best by search\non 500 rows of CR, 12 seeds, on test", "ladder", "cr", 500,
        "AD-DROP on LP-FT", ("LP-FT for 7 epochs", "LP-FT", "plain")),
    ("AD-DROP on plain fine-tuning, the best\non 500 sentences of SST-2, 12 seeds", "ladder", "sst2_sentences", 500,
        "AD-DROP", ("plain for 15 epochs", "plain")),
    ("AD-DROP on few-sample fine-tuning, the\nbest on 500 rows of Subj, 12 seeds", "ladder", "subj", 500,
        "AD-DROP on few-sample", ("few-sample for 15 epochs", "few-sample")),
    ("AD-DROP on plain fine-tuning, the best\non 100 rows of TREC, 12 seeds", "ladder", "trec", 100, "AD-DROP", (
        "plain for 15 epochs", "plain")),
    ("AD-DROP on LP-FT, the best by search\non 100 rows of CR, 12 seeds, on test", "ladder", "cr", 100,
        "AD-DROP on LP-FT", ("LP-FT for 15 epochs", "LP-FT", "plain")),
    ("... 100 sentences of SST-2", "ladder", "sst2_sentences", 100, "AD-DROP on LP-FT", (
        "LP-FT for 7 epochs", "LP-FT")),
    ("... 100 rows of Subj", "ladder", "subj", 100, "AD-DROP on LP-FT", ("LP-FT for 15 epochs", "LP-FT")),
    ("AttendOut as its paper states it,\nCoLA, 8 seeds", "attendout", "cola", 7551, "AttendOut (the paper's game)", (
        "plain", "the game without masks")),
    ("... SST-2 sentences", "attendout", "sst2_sentences", 6920, "AttendOut (the paper's game)", (
        "plain for 6 epochs", "plain", "the game without masks")),
    ("... MRPC, F1", "attendout", "mrpc", 3668, "AttendOut (the paper's game)", (
        "plain for 6 epochs", "plain", "the game without masks")),
)  # fmt: skip
SHOWN = {"plain": "minus plain", "plain for 15 epochs": "minus plain, as many passes", "random": "minus random masks"}
SHOWN |= {"low": "minus lowest attributions", "attention": "minus highest attention", "SetFit": "minus SetFit"}
SHOWN |= {"LP-FT": "minus LP-FT", "LP-FT for 7 epochs": "minus LP-FT, as many passes"}
SHOWN |= {"LP-FT for 15 epochs": "minus LP-FT, as many passes"}
SHOWN |= {"few-sample": "minus few-sample", "few-sample for 15 epochs": "minus few-sample, as many passes"}
SHOWN |= {"plain for 6 epochs": "minus plain, as many passes"}
SHOWN |= {"first token": "minus plain from the first token", "the game without masks": "minus itself without masks"}
LEFT = -2  # the end of the axis; what lies beyond it is written


def interval(row: Row) -> str:
    """Return the interval of a difference as text."""
    return f"[{row['low']:+.4f}, {row['high']:+.4f}]"


def corrected(row: Row) -> str:
    """Return the corrected p as text, bold if the difference holds."""
    return f"**{p_cell(row['p_holm'])}**" if row["p_holm"] < LEVEL else p_cell(row["p_holm"])


def markdown(heads: Sequence[str], texts: int, rows: Sequence[Sequence[str]]) -> str:
    """Return a table, with so many columns of text before those of numbers."""
    lines = [heads, ["---"] * texts + ["---:"] * (len(heads) - texts), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def summary(rows: Sequence[Row]) -> str:
    """Say how many differences hold."""
    holding = sum(row["p_holm"] < LEVEL for row in rows)
    primary = [row for row in rows if row["planned"] == "primary"]
    held = sum(row["p_holm"] < LEVEL for row in primary)
    alone = sum(p < LEVEL for p in holm([row["p"] for row in primary]))
    return (
        f"**{holding} of {len(rows)} differences hold** after Holm's correction over all of them (bold). "
        f"{len(primary)} are primary contrasts, which plans named before their runs; {held} of these "
        f"{'hold' if held - 1 else 'holds'}. Corrected for the {len(primary)} alone, {alone} would."
    )


def all_table(rows: Sequence[Row]) -> str:
    """Return the tables of all comparisons, one for each setting."""
    heads = ["comparison", "note", "difference", "95 % over seeds", "p", "p (Holm)", "detectable"]
    cells: dict[tuple[str, str], list[list[str]]] = {}
    for row in rows:
        matched = f"equal {row['matched']}" if row["matched"] else ""
        notes = ["primary" if row["planned"] == "primary" else "", matched, EXTENSION[row["extension"]]]
        numbers = [f"{row['difference']:+.4f}", interval(row), p_cell(row["p"]), corrected(row)]
        names = [f"{row['method']} - {row['baseline']}", ", ".join(filter(None, notes))]
        found = cells.setdefault((row["setting"], row["study"]), [])
        found.append([*names, *numbers, f"{row['detectable']:.4f}"])
    texts = [summary(rows)]
    for (setting, study), found in cells.items():
        page = f"../{study}/{'study.yaml' if study.startswith('contributed/') else 'README.md'}"
        texts += [f"**{setting}** ([{study}]({page})):", markdown(heads, 2, found)]
    return "\n\n".join(texts)


def board(rows: Sequence[Row]) -> str:
    """Return the board: each method against plain fine-tuning on each task, by the most seeds, and at equal time.

    Where a task has several models, each has rows of its own, and a column names it.
    """
    best: dict[tuple[str, str, str, bool], Row] = {}
    for row in rows:
        if row["board"] and row["baseline"].split(" for ")[0] in ("plain", "finetune"):
            key = (row["board"], SAME.get(row["method"], row["method"]), row["model"], bool(row["matched"]))
            if key not in best or rank(row) < rank(best[key]):
                best[key] = row
    tasks: dict[str, list[tuple[str, Row]]] = {}
    for (task, name, _, matched), row in best.items():
        if not matched:
            tasks.setdefault(task, []).append((name, row))
    heads = ["method", "seeds", "minus plain", "95 % over seeds", "p (Holm)", "at equal time or passes", "p (Holm)"]
    texts = []
    for task, methods in tasks.items():
        cells, several = [], len({row["model"] for _, row in methods}) > 1
        for name, row in sorted(methods, key=lambda each: -each[1]["difference"]):
            numbers = [str(row["seeds"]), f"{row['difference']:+.4f}", interval(row), corrected(row)]
            equal = best.get((task, name, row["model"], True))
            same = ["", ""] if equal is None else [f"{equal['difference']:+.4f} {interval(equal)}", corrected(equal)]
            cells.append([name, *[row["model"]] * several, *numbers, *same])
        texts += [f"**{task}**:", markdown([heads[0], *["model"] * several, *heads[1:]], 1 + several, cells)]
    return "\n\n".join(texts)


def rank(row: Row) -> tuple[bool, bool, int]:
    """Return what decides between comparisons on the board: fresh seeds, then added ones, then their number."""
    return bool(row["extension"]), row["extension"] != "added", -row["seeds"]


def matching(label: str, numbers: Sequence[str], rows: Sequence[Row]) -> Row:
    """Return the comparison with these numbers, as printed, and these words in its names."""
    found = [row for row in rows if [f"{row['difference']:+.4f}", interval(row)] == [*numbers]]
    for word in re.findall(r"[\w-]{3,}", label.lower()):
        names = ("setting", "metric", "method", "baseline", "planned")
        found = [row for row in found if word in " ".join(row[name] for name in names).lower()]
    if len({row["p"] for row in found}) != 1:
        raise SystemExit(f"{label}, {' '.join(numbers)}: expected one comparison in all.csv, got {len(found)}")
    return found[0]


def renewed(text: str, rows: Sequence[Row]) -> str:
    """Return a page with p and p (Holm) of its tables made anew, and what stands between marks."""
    if MARK.format("board") in text:
        for name, made in (("board", board), ("comparisons", all_table)):
            before, after = text.split(mark := MARK.format(name))
            text = f"{before}{mark}\n\n{made(rows)}\n\n{END}{after.split(END, 1)[1]}"
        return text
    lines, heads = text.split("\n"), list[str]()
    for number, line in enumerate(lines):
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line.startswith("|") else []
        heads = heads if cells and heads else cells
        if "95 % over seeds" in heads and re.fullmatch(
            r"\[.*\]", (cells + [""] * 9)[at := heads.index("95 % over seeds")]
        ):
            label = " ".join(cells[place] for place, head in enumerate(heads) if not place or head == "comparison")
            row = matching(label, [cells[at - 1].strip("*"), cells[at]], rows)
            for head, cell in (("p", p_cell(row["p"])), ("p (Holm)", corrected(row))):
                if head in heads:
                    cells[heads.index(head)] = cell
            lines[number] = f"| {' | '.join(cells)} |".replace("|  |", "| |")
    return "\n".join(lines)


def pages() -> list[Path]:
    """Return the pages whose tables have results of our own, without those that tests.tables makes."""
    return [FOLDER.parent / "results.md", *sorted(FOLDER.glob("*/README.md"))]


def shown_on(page: Path, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the comparisons of a study's own page; all of them for other pages."""
    return [row for row in rows if row["study"] == page.parent.name] or rows


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the differences of DRAWN with their intervals."""
    names = ("study", "data", "train_size", "method", "baseline")
    found = {tuple(row[name] for name in names): row for row in reversed(rows)}  # of several, the first
    look, ticks, at = next(styles()), dict[float, str](), 0.0
    height = sum(len(others) + 1.3 for *_, others in DRAWN)
    bold: dict[str, Any] = {
        "fontsize": 8,
        "weight": "bold",
        "va": "center",
        "bbox": {"fc": "white", "ec": "white", "pad": 1},
    }
    with picture(path, width=5.2, height=0.8 + 0.24 * height) as (axes,):  # to be read on a phone
        for title, *arm, others in DRAWN:
            at += 0.5
            axes.text(0.02, at, title, **bold, transform=axes.get_yaxis_transform())
            at += 1.4
            for other in others:
                row = found[(*arm, other)]
                mean, low, high = (100 * row[name] for name in ("difference", "low", "high"))
                filled = look.color if row["p_holm"] < LEVEL else "white"
                bar = {"fmt": "o", "color": look.color, "mfc": filled, "capsize": 3, "ms": 5}
                if mean < LEFT:
                    text = f"◂ {'●' if row['p_holm'] < LEVEL else '○'} {mean:.1f} [{low:.1f}, {high:.1f}], off the axis"
                    axes.text(LEFT + 0.02, at, text, **{**bold, "weight": "normal"}, color=look.color)
                else:
                    axes.errorbar(mean, at, xerr=[[mean - low], [high - mean]], **bar)
                ticks[at] = SHOWN[other]
                at += 1
        axes.axvline(0, color="#888888", lw=0.8)
        axes.set_yticks([*ticks], [*ticks.values()], fontsize=8)
        axes.set_ylim(at - 0.3, -0.3)
        axes.set_xlim(LEFT, 2)
        unit = "points (SST-2 phrases: on dev; CoLA:\nMatthews' correlation), mean and 95 % interval"
        axes.set_xlabel(f"{unit}\nfilled: holds after correction", fontsize=8)


def main() -> None:
    """Make everything anew, or only the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="write the picture there, and nothing else")
    options = parser.parse_args()
    rows = comparisons()
    print(summary(rows))
    draw(rows, options.path or FOLDER / "overview.png")
    if options.path is None:
        write(rows)
        for page in pages():
            page.write_text(renewed(page.read_text(encoding="utf-8"), shown_on(page, rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
