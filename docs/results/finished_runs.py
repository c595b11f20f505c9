"""What the scripts on finished runs share: a table of runs, and a table of paired differences."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from attnreg.experiments.compare.contrast import difference_cells
from attnreg.experiments.compare.statistics import Difference, detectable, holm, paired_difference

Row = Mapping[str, object]


def table(
    description: str | None, columns: Sequence[str], name: str, read: Callable[[Path], Iterable[Row]]
) -> tuple[list[dict[str, str]], Path]:
    """Read the command line and return rows and a folder: runs of comparisons, which it writes, or a written table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", metavar="COMPARISON", nargs="*", type=Path)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--table", type=Path, help="a table that an earlier call has written, instead of comparisons")
    options = parser.parse_args()
    if bool(options.comparisons) == bool(options.table):
        parser.error("give either folders of comparisons or --table")
    path = options.table or options.output_dir / name
    options.output_dir.mkdir(parents=True, exist_ok=True)
    if options.comparisons:
        rows = [row for folder in options.comparisons for row in read(folder)]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)], options.output_dir


def print_differences(
    heads: Sequence[str], rows: Sequence[tuple[Sequence[str], ArrayLike, ArrayLike]]
) -> list[Difference]:
    """Print and return paired differences; p (Holm) is corrected over all rows."""
    found = [paired_difference(ours, theirs) for _, ours, theirs in rows]
    print("| " + " | ".join([*heads, "difference", "95 % over seeds", "p", "p (Holm)", "detectable"]) + " |")
    print("| " + " | ".join(["---"] * len(heads) + ["---:"] * 5) + " |")
    adjusted = holm([d.p for d in found])
    for (names, ours, theirs), d, p in zip(rows, found, adjusted, strict=True):
        each = np.subtract(ours, theirs)
        least = detectable(float(each.std(ddof=1)), len(each))
        print("| " + " | ".join([*names, *difference_cells(d, p, len(each)), f"{least:.4f}"]) + " |")
    return found
