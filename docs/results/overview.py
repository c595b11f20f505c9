"""Write all.csv, p in the tables of all pages, the board, and the first picture of the results.

Usage: python docs/results/overview.py
       python docs/results/overview.py --path FILE.png    # only the picture
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from published import FOLDER, SHORT, FloatArray, Row, comparisons, paired, settings, table, write
from scipy import stats

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
# Data sets in the picture and in the table of on-average.
NAMES = {
    "sst2_sentences": "SST-2's sentences", "mr": "MR (films)", "cr": "CR (products)", "subj": "Subj (films)",
    "trec": "TREC (questions)", "mrpc": "MRPC (pairs)", "banking77": "BANKING77 (intents)",
    "clinc150": "CLINC150 (intents)",
}  # fmt: skip


ARMS = {
    "ad-drop": "AD-DROP",
    "random": "random masks",
    "plain": "plain",
    "longer": "plain for as long",
}  # of on-average


def untested(row: Row) -> str:
    """Return why a difference has no interval and no p, if it has none."""
    return "" if not isnan(row["low"]) else "1 seed" if row["seeds"] == 1 else "all equal"


def interval(row: Row) -> str:
    """Return the interval of a difference as text."""
    return untested(row) or f"[{row['low']:+.4f}, {row['high']:+.4f}]"


def corrected(row: Row) -> str:
    """Return the corrected p as text, bold if the difference holds."""
    return f"**{p_cell(row['p_holm'])}**" if row["p_holm"] < LEVEL else untested(row) or p_cell(row["p_holm"])


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
        numbers = [f"{row['difference']:+.4f}", interval(row), untested(row) or p_cell(row["p"]), corrected(row)]
        names = [f"{row['method']} - {row['baseline']}", ", ".join(filter(None, notes))]
        found = cells.setdefault((row["setting"], row["study"]), [])
        found.append([*names, *numbers, untested(row) or f"{row['detectable']:.4f}"])
    texts = [summary(rows)]
    for (setting, study), found in cells.items():
        page = f"../{study}/{'study.yaml' if study.startswith('contributed/') else 'README.md'}"
        texts += [f"**{setting}** ([{study}]({quote(page)})):", markdown(heads, 2, found)]
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


def averaged(rows: Sequence[Row]) -> tuple[Row, dict[tuple[str, str], FloatArray]]:
    """Return the comparison over data sets and models, and by data set and model the scores ``(2, seeds)`` of both."""
    whole = next(row for row in rows if row["study"] == "on-average" and row["planned"] == "primary")
    setting = next(each for each in settings() if each["study"] == "on-average")
    _, pairs = paired([whole["scores"], whole["baseline_scores"]], setting, whole["setting"])
    places = [(data, model) for data, model in (task.split("-model=") for task in setting["pooled"])]
    return whole, dict(zip(places, pairs, strict=True))


def data_sets(rows: Sequence[Row]) -> str:
    """Return the table of mean scores on each data set and model."""
    whole, scores = averaged(rows)
    cells = []
    for data, model in sorted(scores, key=lambda place: [*NAMES].index(place[0])):
        mine, other = scores[data, model].mean(1)
        cells.append([NAMES[data], SHORT[model], f"{other:.3f}", f"{mine:.3f}", f"{100 * (mine - other):+.1f}"])
    return markdown(["data set", "model", whole["baseline"], whole["method"], "difference, points"], 2, cells)


def arms(rows: Sequence[Row]) -> str:
    """Return the table of the arms of on-average: means over data sets, models and the seeds that all arms have."""
    runs: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for run in table("on-average/results.csv"):
        score_of = runs.setdefault((run["method"], f"{run['scored_on']} {run['metric']}"), {})
        score_of[run["task"], run["seed"]] = float(run["score"])
    shared = sorted(set.intersection(*(set(runs[arm, "test accuracy"]) for arm in ARMS)))
    scores, errors = (
        [[runs[arm, name][run] for run in shared] for arm in ARMS]
        for name in ("test accuracy", "dev calibration_error")
    )
    ranks = stats.rankdata([[-score for score in of_arm] for of_arm in scores], axis=0)
    columns = zip(ARMS.values(), scores, ranks, errors, strict=True)
    cells = [[arm, f"{fmean(s):.4f}", f"{fmean(r):.2f}", f"{fmean(e):.3f}"] for arm, s, r, e in columns]
    return markdown(["arm", "accuracy", "rank, 1 to 4", "calibration error, dev"], 1, cells)


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
    for name, made in MADE.items():
        if (mark := MARK.format(name)) in text:
            before, after = text.split(mark)
            text = f"{before}{mark}\n\n{made(rows)}\n\n{END}{after.split(END, 1)[1]}"
    if MARK.format("board") in text:
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


#: What stands between marks, by their name.
MADE = {"board": board, "comparisons": all_table, "data sets": data_sets, "arms": arms}


def pages() -> list[Path]:
    """Return the pages whose tables have results of our own, without those that tests.tables makes."""
    return [FOLDER.parent / "results.md", *sorted(FOLDER.glob("*/README.md"))]


def shown_on(page: Path, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the comparisons of a study's own page; all of them for other pages."""
    return [row for row in rows if row["study"] == page.parent.name] or rows


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the differences on each data set and model, their mean, and what a new data set and model may expect."""
    whole, scores = averaged(rows)
    gaps = {place: 100 * (mine - other) for place, (mine, other) in scores.items()}
    places = {data: number for number, data in enumerate(data for data in NAMES if data in {d for d, _ in gaps})}
    models = dict.fromkeys(model for _, model in gaps)
    earlier = [row for row in rows if row["study"] == "replication" and row["train_size"] == 500]
    longer = {row["data"]: row for row in earlier if row["planned"] == "primary"}
    with picture(path, width=5.2, height=1.6 + 0.42 * len(places), grid="x") as (axes,):  # to be read on a phone
        for number, (model, look) in enumerate(zip(models, itertools.islice(styles(), 1, None), strict=False)):
            found = [(data, points) for (data, name), points in gaps.items() if name == model]
            shift = 0.18 * (2 * number - 1)
            for label, (data, points) in zip([SHORT[model], *[None] * len(found)], found, strict=False):
                half = 0.0 if len(points) < 2 else spread(points)
                axes.errorbar(points.mean(), places[data] + shift, xerr=half, fmt=look.marker, color=look.color,
                              capsize=3, ms=6, label=label)  # fmt: skip
        label: str | None = "MiniLM, 12 other seeds, float32"
        for data, row in longer.items():
            if data in places:
                low, mean, high = (100 * row[name] for name in ("low", "difference", "high"))
                axes.errorbar(mean, places[data], xerr=[[mean - low], [high - mean]], fmt="x", color="#888888",
                              capsize=3, ms=4, label=label)  # fmt: skip
                label = None
        at = len(places) + 0.3
        low, high, mean = (100 * whole[name] for name in ("low", "high", "difference"))
        axes.plot([100 * whole["new_low"], 100 * whole["new_high"]], [at, at], color="#000000", lw=1)
        axes.plot([low, high], [at, at], color="#000000", lw=4, solid_capstyle="butt")
        axes.plot(mean, at, "D", color="#000000", mfc="white", ms=7)
        axes.axvline(0, color="#888888", lw=0.8)
        axes.axhline(len(places) - 0.35, color="#888888", lw=0.8)
        axes.set_yticks([*places.values(), at], [*(NAMES[data] for data in places), "mean; thin: a new data set"],
                        fontsize=8)  # fmt: skip
        axes.set_ylim(at + 0.6, -0.6)
        axes.set_xlabel(
            "AD-DROP minus plain fine-tuning of as many passes, points of accuracy", fontsize=8, loc="right"
        )
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.35, 1.14), ncols=3, columnspacing=1)


def spread(points: Any) -> float:
    """Return half of the 95 % interval of a mean, by Student's t."""
    return float(stats.t.ppf(0.975, len(points) - 1) * points.std(ddof=1) / len(points) ** 0.5)


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
