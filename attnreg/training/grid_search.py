"""Hyper-parameter search on rows held out from train: the dev set is for the report alone."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attnreg.errors import UsageError
from attnreg.training.loop import History
from attnreg.training.run import Run

Values = Mapping[str, float]
MOST = 1000


def parse_grid(texts: Iterable[str], ranges: Mapping[str, tuple[float, float]]) -> list[dict[str, float]]:
    """All combinations of values such as ``p=0.1:0.9:0.1`` (start, stop, step, both ends in) and ``q=0.2,0.5``.

    Args:
        texts: one for each hyper-parameter.
        ranges: what may be searched, and its least and largest value.

    Raises:
        UsageError: if a text is not of this form.

    Example:
        >>> parse_grid(["p=0.1:0.3:0.1", "q=0.5"], {"p": (0, 1), "q": (0, 1)})
        [{'p': 0.1, 'q': 0.5}, {'p': 0.2, 'q': 0.5}, {'p': 0.3, 'q': 0.5}]
    """
    axes: dict[str, list[float]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in ranges or name in axes:
            raise UsageError(
                f"Expected --search to name each of {', '.join(ranges)} at most once, as in {next(iter(ranges))}="
                f"0.1:0.9:0.1, got {text!r}."
            )
        axes[name] = _axis(text, values)
        least, largest = ranges[name]
        if not least <= min(axes[name]) <= max(axes[name]) <= largest:
            raise UsageError(f"Expected --search {name} within [{least}, {largest}], got {text!r}.")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _axis(text: str, values: str) -> list[float]:
    try:
        if ":" not in values:
            return [float(value) for value in values.split(",")]
        start, stop, step = map(float, values.split(":"))
        count = math.floor((stop - start) / step + 1e-9) + 1
        if not 1 <= count <= MOST or step <= 0:
            raise ValueError
    except (ValueError, ArithmeticError):
        raise UsageError(
            f"Expected --search as NAME=START:STOP:STEP (at most {MOST} values) or NAME=VALUE,VALUE, got {text!r}: "
            "as in p=0.1:0.9:0.1."
        ) from None
    return [round(start + number * step, 10) for number in range(count)]


def search(
    run: Run, grid: list[dict[str, float]], train: Callable[[Run, Values], History], rows: int
) -> tuple[dict[str, float], str]:
    """Train once per combination on all but some rows of train, and choose by the last epoch's score on those rows.

    Each try is a run in the folder ``search`` within the run's own; one that is finished there is not run again.

    Args:
        run: the run to choose hyper-parameters for; its own data is left as it is.
        grid: of :func:`parse_grid`.
        train: trains a run with some values.
        rows: number of rows held out.

    Returns:
        the values with the best score (the first of equals), and a sentence for the report.
    """
    if run.settings.validation_rows is not None:
        raise UsageError("Expected either --search or --validation-rows, got both: each holds rows out of train.")
    run.accelerator.wait_for_everyone()  # until all processes have found the folder as it should be
    if not run.folder.begun:
        run.folder.create(run.settings)
    scores = []
    for number, values in enumerate(grid):
        name = ",".join(f"{key}={value:g}" for key, value in values.items())
        folder = run.folder.path / "search" / name
        if not _finished(folder, run.epochs):
            if run.folder.writer:
                print(f"search {number + 1}/{len(grid)}: {name}", flush=True)
            train(run.trial(folder, values, rows), values)
        scores.append(float(_records(folder)[-1][run.task.metric]))
    best = max(range(len(grid)), key=scores.__getitem__)
    chosen = ", ".join(f"{key} = {value:g}" for key, value in grid[best].items())
    run.search = {"tries": len(grid), "rows": rows, "chosen": grid[best]}
    return grid[best], (
        f"{chosen} had the best {run.task.metric} of {len(grid)} tries ({scores[best]:.4f}; all: "
        f"{min(scores):.4f} to {max(scores):.4f}) on {rows} rows held out from train; dev took no part in the choice."
    )


def _records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def _finished(folder: Path, epochs: int) -> bool:
    records = _records(folder)
    return bool(records) and records[-1]["epoch"] == epochs
