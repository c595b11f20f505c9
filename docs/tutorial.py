"""Run the tutorial, and write its outputs and its notebook: ``python docs/tutorial.py DATA MODEL``.

DATA is a folder with ``train.jsonl.gz`` and ``test.jsonl.gz`` of customer reviews (columns ``sentence`` and ``label``),
MODEL the folder of MiniLM. The page is its own source: this runs its blocks, one after the other, and puts what they
print below each, and the pictures into ``_static/tutorial``.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pandas as pd

PAGE = Path(__file__).with_suffix(".md")
PICTURES = PAGE.parent / "_static" / "tutorial"
HUB = "sentence-transformers/all-MiniLM-L6-v2"
#: What a block of code or commands is, with its output, if there is one.
BLOCK = re.compile(
    r"^```(python tutorial|bash)\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.M | re.S
)
#: Lines of a fit or a comparison that only say how far it is
PROGRESS = re.compile(
    r", fold (?!1:)|, fold .*most \d min|, all rows  \(|, again  \(|at a time  |^training (?!.* on all)|^dropped "
    r"|\d of \d+ runs done|^{'train_runtime'"
)
SHOWN = {"calibration.png": "fit-reviews/plots", "differences.png": "compared/plots"}


def write_rows(data: Path) -> None:
    """Write 400 reviews to train on, 300 to test and three without labels, as files that people have."""
    for split, parts in {
        "train": {"reviews": 400},
        "test": {"test": 300, "new": 3},
    }.items():
        with gzip.open(data / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        random.Random(0).shuffle(rows)
        for name, count in parts.items():
            texts = [row["sentence"] for row in rows[:count]]
            labels = [("negative", "positive")[row["label"]] for row in rows[:count]]
            columns = (
                {"text": texts}
                if name == "new"
                else {"text": texts, "label": labels}
            )
            pd.DataFrame(columns).to_csv(f"{name}.csv", index=False)
            rows = rows[count:]


def ran(kind: str, code: str, names: dict[str, Any], model: Path) -> str:
    """Run a block and return what it prints."""
    code = code.replace(HUB, str(model))
    if kind == "bash":
        wide = {**os.environ, "COLUMNS": "85"}  # as code boxes of the site
        done = subprocess.run(
            ["bash", "-ec", code], capture_output=True, text=True, env=wide
        )
        assert done.returncode == 0, done.stdout + done.stderr
        output = done.stdout
    else:
        with (
            contextlib.redirect_stdout(io.StringIO()) as file,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            exec(compile(code, "<tutorial>", "exec"), names)
        output = file.getvalue()
    lines = [
        line.rstrip()
        for line in output.replace(str(model), HUB).splitlines()
        if not PROGRESS.search(line)
    ]
    return "\n".join(lines).strip() + "\n"


def notebook(text: str) -> dict[str, Any]:
    """Return the page as a notebook, with its outputs."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str, **more: Any) -> None:
        if source.strip():
            cells.append(
                {
                    "cell_type": kind,
                    "id": f"cell-{len(cells)}",
                    "metadata": {},
                    "source": source.strip(),
                    **more,
                }
            )

    end = 0
    for found in BLOCK.finditer(text):
        add("markdown", text[end : found.start()])
        code = found[2] if found[1] != "bash" else f"%%bash\n{found[2]}"
        printed = re.search(r"^```text\n(.*?)^```\n", found[0], re.M | re.S)
        outputs = (
            [{"output_type": "stream", "name": "stdout", "text": printed[1]}]
            if printed
            else []
        )
        add("code", code, execution_count=None, outputs=outputs)
        end = found.end()
    add("markdown", text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main() -> None:
    """Run all blocks in a folder of their own, then write page, pictures and notebook."""
    data, model = (Path(each).resolve() for each in sys.argv[1:])
    names: dict[str, Any] = {"__name__": "__main__"}

    def renewed(found: re.Match[str]) -> str:
        kind, code = found.groups()
        output = ran(kind, code, names, model)
        print(code, output, sep="\n", flush=True)
        return f"```{kind}\n{code}```\n" + (
            f"\n```text\n{output}```\n" if output.strip() else ""
        )

    page, home = PAGE.read_text(encoding="utf-8"), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_rows(data)
        page = BLOCK.sub(renewed, page)
        PICTURES.mkdir(exist_ok=True)
        for name, place in SHOWN.items():
            shutil.copy(Path("runs", place, name), PICTURES)
        os.chdir(home)
    PAGE.write_text(page, encoding="utf-8")
    text = json.dumps(notebook(page), indent=1, ensure_ascii=False)
    PAGE.with_suffix(".ipynb").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
