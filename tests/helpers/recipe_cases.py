"""The one table of recipes that tests take their rows from: the files in ``recipes/``.

A recipe without options here is tried with its defaults, so that a new one is tried everywhere at once.
"""

from __future__ import annotations

import json
import re

import pytest

from attnreg.experiments.options.files import recipe_files
from tests.helpers.commands import ran, read_lines, result_of

OPTIONS = {
    "ad-drop": ["--p", 0.5, "--q", 0.4],
    "attendout": ["--round-steps", 2, "--no-baseline"],
    "attention-layerdrop": ["--drop-rate", 0.5],
    "child-tuning": ["--mode", "D"],
    "hiddenkey": ["--p", 0.1],
    "mixout": ["--p", 0.1],
    "r3f": ["--eps", 0.1],
    "regularize": ["--provider", "DropKey(0.1)"],
    "scheduled-bernoulli": ["--start", 0.3, "--end", 0.1],
}
OTHERS = ("pretrain", "set-fit")  # of other tasks, results or packages; they have tests of their own
RECIPES = {name: OPTIONS.get(name, []) for name in recipe_files() if name not in OTHERS}
#: Public names whose arguments are options of a recipe, such as ``attnreg.training.SAM``.
SOURCES = {
    name: {*re.findall(r"attnreg\.(?:training\.)?[A-Z]\w+", path.read_text())} for name, path in recipe_files().items()
}
WITH_PROVIDER = {name for name, path in recipe_files().items() if re.search(r"provider=|--generator", path.read_text())}


def recipes(*quick):
    """A row for each recipe; all but some are slow."""
    return pytest.mark.parametrize(
        "recipe", [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in RECIPES]
    )


def evaluated_again(cli, run, *options):
    """A saved run is evaluated with the loss with which it ended; return what else was written, and the dev scores."""
    ran(cli("evaluate", run, *options))
    [path] = (run / "evaluations").iterdir()
    written, dev = json.loads(path.read_text()), result_of(run)["dev"]
    assert written["metrics"].pop("loss") == pytest.approx(dev["loss"], abs=1e-6)
    return written, dev


def assert_evaluated_as_trained(cli, folder, args, data, rows):
    """A run under AD-DROP, and one of LoRA alone, are saved, drawn, and scored again on their dev rows as they ended."""
    for recipe, further in (("ad-drop", []), ("finetune", ["--lora-rank", 2, "--lora-targets", "all-linear"])):
        ran(cli("recipe", recipe, *args, *further, "--output-dir", recipe))
        written, dev = evaluated_again(cli, folder / recipe, "--data-dir", data)
        assert written["rows"] == rows
        assert written["metrics"].items() <= dev.items()
        assert len(read_lines(folder / recipe / "predictions.jsonl")) == rows
        ran(cli("plot", recipe))
