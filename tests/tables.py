"""What is made, not written, in the README and the docs: ``python -m tests.tables``.

The tables of regularizers come from the list of public names; the figures on a regularizer's page, from the table of
cost and the file of all comparisons.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from attnreg.experiments.compare.contrast import LEVEL
from attnreg.experiments.options.option import EXCLUDES, KINDS, NEEDS, flag_of, typed
from attnreg.regularizer.saving import built_in
from tests.helpers.repository import ROOT

FOLDER = ROOT / "docs" / "providers"
MARKS = [f"<!-- {what}: made by python -m tests.tables -->" for what in ("providers", "figures", "options")]
BEGIN, FIGURES, OPTIONS = MARKS
END = "<!-- end -->"


def _pages() -> dict[str, Path]:
    """The page of each provider: the one with a heading that names it. Their overview has ``OnLayers``."""
    headings = {
        page: " ".join(re.findall("^#+ (.*)", page.read_text(encoding="utf-8"), re.M))
        for page in sorted(FOLDER.glob("*.md"))
    }
    found = {
        name: next((page for page, text in headings.items() if re.search(rf"\b{name}\b", text)), None)
        for name in built_in()
        if name != "Compose"
    }
    return {name: page for name, page in {**found, "OnLayers": FOLDER / "README.md"}.items() if page is not None}


#: The page of each provider that has one.
PAGE_OF = _pages()


#: Those that the README names; their overview has all.
FEATURED = {"ADDrop", "GNetProvider", "AttentionDropout", "AttentionLayerDrop", "BernoulliScheduleProvider", "DropKey"}
FEATURED |= {"DropHead", "LayerDrop", "HiddenKey", "HiddenCut", "EmbeddingNoise", "UniDrop"}

#: The provider of each method that was compared with plain fine-tuning, and the methods that have no page here.
RESULTS_OF = {
    "AD-DROP": "AttributionProvider",
    "high": "AttributionProvider",
    "AD-DROP on LP-FT": "AttributionProvider",
    "AD-DROP on few-sample": "AttributionProvider",
    "AttendOut": "GNetProvider",
    "AttendOut (clean rewards)": "GNetProvider",
    "AttendOut (the paper's game)": "GNetProvider",
    "attention-dropout": "AttentionDropout",
    "scores dropout": "AttentionDropout",
    "weights dropout": "AttentionDropout",
    "attention-layerdrop": "AttentionLayerDrop",
    "Attention LayerDrop": "AttentionLayerDrop",
    "scheduled-bernoulli": "BernoulliScheduleProvider",
    "NEFTune": "EmbeddingNoise",
    "large dropout": "HiddenDropout",
    "HiddenKey": "HiddenKey",
}
NO_PROVIDERS = {"SAM", "R-Drop", "early stopping", "random", "low", "attention", "every epoch"}
NO_PROVIDERS |= {"linear probe", "first token", "LP-FT", "few-sample", "LoRA", "EMA", "WiSE-FT", "soup", "SetFit"}
NO_PROVIDERS |= {"plain with the clean rows", "selection (clean rewards)", "masks (clean rewards)"}
NO_PROVIDERS |= {
    "the game without masks",
    "the game with a frozen Generator",
    "plain for 15 epochs",
    "plain for 6 epochs",
}
NO_PROVIDERS |= {"LP-FT for 7 epochs"}


def choose_if(name: str) -> str:
    """What the provider's page says after **Choose it if**."""
    text = PAGE_OF[name].read_text(encoding="utf-8")
    found = re.search(rf"\*\*Choose (?:it|`{name}`) if\*\* (.+?)\.\n", text, re.S)
    return " ".join(found[1].split()) if found else ""


def table(place: Path) -> str:
    """The rows, with links as seen from a file."""
    in_docs = place.parent == FOLDER
    rows = [["regularizer", "what it does", "choose it if"], ["---"] * 3]
    folders = ["attendout", "regularizers", "regularizer"]
    for name, cls in sorted(built_in().items(), key=lambda x: (folders.index(x[1].__module__.split(".")[1]), x[0])):
        if name not in PAGE_OF or not (in_docs or name in FEATURED):
            continue
        summary = (cls.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        link = PAGE_OF[name].name if in_docs else f"docs/providers/{PAGE_OF[name].name}"
        rows.append([f"[`{name}`]({link})", summary, choose_if(name)])
    return "\n".join("| " + " | ".join(row if in_docs else row[:2]) + " |" for row in rows)


def costs(named: str) -> dict[str, dict[str, str]]:
    """What the table of cost says of the rows whose first cell begins with one of some names: numbers by column."""
    lines = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| step |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    head, _, *cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    return {
        row[0]: {column: re.sub(" ?[¹²³⁴⁵]", "", cell) for column, cell in zip(head[1:], row[1:], strict=True) if cell}
        for row in cells
        if re.match(rf"({named})\b", row[0], re.I)
    }


def rules_of_options() -> str:
    """The options that exclude or need each other, and those for some kinds of tasks."""

    def code(name: str) -> str:
        return f"`{typed(name, flag_of)}`"

    rules = [(f"not with {code(other)}", code(one)) for one, other, _ in EXCLUDES]
    rules += [(f"need {' or '.join(map(code, needed))}", code(name)) for name, needed in NEEDS]
    rules += [(f"are for {what}", code(name)) for name, what, _ in KINDS]
    options: dict[str, list[str]] = {}
    for rule, option in rules:
        options.setdefault(rule, []).append(option)
    rows = [f"| {', '.join(names)} | {rule} |" for rule, names in options.items()]
    return "\n".join(["| options | rule |", "| --- | --- |", *rows])


def by_device(numbers: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The number of each device, which the name of its column begins with; of several columns, the first."""
    first = {column.partition(":")[0]: number for column, number in reversed(numbers.items())}
    return ((device, first[device]) for device in sorted(first))


def figures(page: Path) -> str:
    """What a page's regularizers, or its recipe, cost, and what our studies found."""
    own = [name for name in built_in() if PAGE_OF.get(name) == page]
    recipes = set(re.findall(r"attnreg recipe (\S+)", page.read_text(encoding="utf-8"))) - {"regularize"}
    cost = costs("|".join([*own, *sorted(recipes)]))
    text = "**Cost**, in plain steps ([all](../cost.md)): "
    each = [", ".join(f"{number} ({device})" for device, number in by_device(numbers)) for numbers in cost.values()]
    if len(cost) > 1:
        each = [f"{name} {numbers}" for name, numbers in zip(cost, each, strict=True)]
    told = [f"{text}{'; '.join(each)}."] if cost else []
    return "\n\n".join([*told, *results(own)])


def results(own: list[str]) -> list[str]:
    """One line on the comparisons of a page's regularizers with plain fine-tuning, in all settings of our own studies."""
    with (ROOT / "docs" / "results" / "comparisons" / "all.csv").open(newline="", encoding="utf-8") as file:
        compared = [row for row in csv.DictReader(file) if row["baseline"] == "plain" and row["board"]]
    compared = [row for row in compared if row["extension"] not in ("prompted", "pooled")]
    compared = [row for row in compared if not row["study"].startswith("contributed/")]
    for row in compared:
        assert row["method"] in {*RESULTS_OF} | NO_PROVIDERS, f"add {row['method']} to RESULTS_OF or NO_PROVIDERS"
    gaps = [row for row in compared if RESULTS_OF.get(row["method"]) in own]
    if not gaps:
        return []
    held = [100 * float(row["difference"]) for row in gaps if float(row["p_holm"] or 1) < LEVEL]
    signs = {"gain": sorted(gap for gap in held if gap > 0), "loss": sorted(-gap for gap in held if gap < 0)}
    counts = [
        f"{len(points)} {name if len(points) == 1 else {'gain': 'gains', 'loss': 'losses'}[name]} "
        f"of {' to '.join(dict.fromkeys((f'{points[0]:.1f}', f'{points[-1]:.1f}')))} points"
        for name, points in signs.items()
        if points
    ]
    outcome = " and ".join(counts) or "no difference"
    outcome = f"{outcome} {'holds' if len(held) < 2 else 'hold'} after correction"
    comparisons = "One comparison" if len(gaps) == 1 else f"{len(gaps)} comparisons"
    return [
        f"**Our results.** {comparisons} with plain fine-tuning: {outcome} ([all](../results/comparisons/README.md))."
    ]


def renewed(place: Path) -> str:
    """The text of a file with its table or figures made anew."""
    text = place.read_text(encoding="utf-8")
    mark = next(mark for mark in MARKS if mark in text)
    if mark == OPTIONS:
        made = f"\n{rules_of_options()}\n"
    else:
        made = table(place) if mark == BEGIN else f"\n{figures(place)}\n"
    before, after = text.split(mark)[0], text.split(mark)[1].split(END)[1]
    return f"{before}{mark}\n{made}\n{END}{after}"


PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem not in ("README", "families"))
PLACES = (ROOT / "README.md", FOLDER / "README.md", ROOT / "docs" / "running.md", *PAGES)

if __name__ == "__main__":
    for each in PLACES:
        each.write_text(renewed(each), encoding="utf-8")
