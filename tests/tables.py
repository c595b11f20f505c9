"""What is made, not written, in the README and the docs: ``python -m tests.tables``.

The tables of providers come from the list of public names; the figures on a provider's page, from the table of cost
and the file of all comparisons.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from attnreg.experiments.compare.contrast import p_cell
from attnreg.regularizer.saving import built_in

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "providers"
BEGIN, FIGURES = (f"<!-- {what}: made by python -m tests.tables -->" for what in ("providers", "figures"))
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
        if name not in PAGE_OF:
            continue
        summary = (cls.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        link = PAGE_OF[name].name if in_docs else f"docs/providers/{PAGE_OF[name].name}"
        rows.append([f"[`{name}`]({link})", summary, choose_if(name)])
    return "\n".join("| " + " | ".join(row if in_docs else row[:2]) + " |" for row in rows)


def rows_of(page: str, named: str, header: str) -> list[str]:
    """The rows of a table whose first cell begins with one of some names, below its header, without empty columns."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(header))
    end = next(number for number in range(begin, len(lines)) if not lines[number].startswith("|"))
    found = [line for line in lines[begin + 2 : end] if re.match(rf"\| ({named})\b", line, re.I)]
    cells = [line.strip("|").split("|") for line in [*lines[begin : begin + 2], *found]]
    told = [column for column in range(len(cells[0])) if any(row[column].strip() for row in cells[2:])]
    return ["|" + "|".join(row[column] for column in told) + "|" for row in cells] if found else []


def figures(page: Path) -> str:
    """The rows of a page's providers, or of its recipe, in the tables of cost and of results."""
    own = [name for name in built_in() if PAGE_OF.get(name) == page]
    recipes = set(re.findall(r"attnreg recipe (\S+)", page.read_text(encoding="utf-8"))) - {"regularize", "probe"}
    named = "|".join([*own, *sorted(recipes)])
    cost = [re.sub(" ?[¹²³⁴⁵⁶⁷]", "", row) for row in rows_of("cost.md", named, "| step |")]
    text = "**Cost** of a training step, as a multiple of a plain one ([all](../cost.md)):"
    lines = [text, "", *cost] if cost else ["**Cost.** Not measured by itself ([others](../cost.md))."]
    if cost and cost[0].count("|") == 3:  # measured on one model alone
        model, *found = [[cell.strip() for cell in row.strip("|").split("|")] for row in (cost[0], *cost[2:])]
        each = "; ".join(f"{name} {ratio}" for name, ratio in found)
        lines = [f"**Cost** of a training step, as a multiple of a plain one ({model[1]}; [all](../cost.md)): {each}."]
    found = results(own)
    text = "**Results.** Score minus that of plain fine-tuning; p is corrected for [all comparisons](../results/comparisons/README.md):"
    lines += ["", text, "", *found] if found else ["", "**Results.** None of our own yet ([others](../results.md))."]
    return "\n".join(lines)


def results(own: list[str]) -> list[str]:
    """A table of the comparisons of a page's providers with plain fine-tuning, in all settings of our own studies."""
    with (ROOT / "docs" / "results" / "comparisons" / "all.csv").open(newline="", encoding="utf-8") as file:
        compared = [row for row in csv.DictReader(file) if row["baseline"] == "plain" and row["board"]]
    lines = ["| setting | difference | 95 % over seeds | p (Holm) |", "| --- | ---: | ---: | ---: |"]
    for row in compared:
        name = row["method"]
        if row["extension"] in ("prompted", "pooled") or row["study"].startswith("contributed/"):
            continue
        assert name in {*RESULTS_OF} | NO_PROVIDERS, f"add {name} to RESULTS_OF or NO_PROVIDERS"
        if RESULTS_OF.get(name) in own:
            alone = {*own} <= {RESULTS_OF[name], "CrossTuning"}
            setting = ", ".join([row["setting"], *re.findall(r"\((.+)\)$", name)])
            setting = setting if alone else f"{name}: {row['setting']}"
            mean, low, high, p = (float(row[number]) for number in ("difference", "low", "high", "p_holm"))
            lines.append(f"| {setting} | {mean:+.4f} | [{low:+.4f}, {high:+.4f}] | {p_cell(p)} |")
    return lines if len(lines) > 2 else []


def renewed(place: Path) -> str:
    """The text of a file with its table or figures made anew."""
    text = place.read_text(encoding="utf-8")
    mark, made = (BEGIN, table(place)) if BEGIN in text else (FIGURES, f"\n{figures(place)}\n")
    before, after = text.split(mark)[0], text.split(mark)[1].split(END)[1]
    return f"{before}{mark}\n{made}\n{END}{after}"


PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem not in ("README", "families"))
PLACES = (ROOT / "README.md", FOLDER / "README.md", *PAGES)

if __name__ == "__main__":
    for each in PLACES:
        each.write_text(renewed(each), encoding="utf-8")
