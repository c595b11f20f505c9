"""The tables of a comparison's report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.contrast import Contrast
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.planned import FIRST_SEED, score_cells
from attnreg.experiments.options.option import as_typed
from attnreg.experiments.options.settings import NO_OPTIONS
from attnreg.experiments.results.document import Table


def scores(groups: Sequence[Group], baseline: Group) -> Table:
    """Mean, standard deviation and the score of every seed; last, the trivial predictor."""
    entries = [(group.name, group.runs, group.scores) for group in groups]
    entries += [] if baseline.trivial is None else [(baseline.trivial[0], baseline.runs, baseline.trivial[1])]
    rows, seeds = [], [run.seed for group in groups for run in group.runs]
    for name, runs, values in entries:
        mean, _ = score_cells(values)
        deviation = f"{np.std(values, ddof=1):.4f}" if len(values) > 1 else "1 seed"  # `stdev` takes no nan
        of_seed = {run.seed: f"{value:.3f}" for run, value in zip(runs, values, strict=True)}
        scores_by_seed = "  ".join(of_seed.get(seed, "none") for seed in range(min(seeds), max(seeds) + 1))
        rows.append({"method": name, "mean": mean, "SD": deviation, f"seeds, from {min(seeds)}": scores_by_seed})
    return Table.of(rows, texts=(0, 3))


def differences(compared: Sequence[Contrast]) -> Table:
    """A method's score minus the baseline's, paired by seed."""
    rows = []
    for contrast in compared:
        detects = contrast.cells["p"] if contrast.detectable is None else f"{contrast.detectable:.4f}"
        rows.append({"method": contrast.mine.name, **contrast.cells, "detectable": detects})
    return Table.of(rows)


def fit(groups: Sequence[Group]) -> Table:
    """Scores, losses and calibration."""
    rows = []
    for group in groups:
        train, dev = (group.mean(split, group.metric) for split in ("train", "dev"))
        row = {"method": group.name, "train": f"{train:.4f}", group.where: f"{dev:.4f}", "gap": f"{train - dev:+.4f}"}
        columns = zip(("train", "dev"), ("train", group.where), strict=True)
        row |= {f"{name} loss": f"{group.mean(split, 'loss'):.3f}" for split, name in columns}
        errors = [result["dev"]["calibration_error"] for result in group.results]
        row["calibration error"] = "none" if None in errors else f"{fmean(errors):.3f}"
        rows.append(row)
    return Table.of(rows)


def cost(groups: Sequence[Group], baseline: Group) -> Table:
    """Time and memory relative to the baseline, and the drop rate."""
    rows = []
    for group in groups:
        memory, of_baseline = (runs.mean("peak_memory_bytes") for runs in (group, baseline))
        row = {"method": group.name, "training time (s)": f"{group.training_time:.0f}"}
        row["time ratio"] = f"{group.training_time / baseline.training_time:.2f}"
        row["memory ratio"] = f"{memory / of_baseline:.2f}" if of_baseline else "not measured"  # on some systems
        by_layer = [result["drop_rates"] for result in group.results]
        layers = {name for rates in by_layer for name, rate in rates.items() if rate > 0}
        rates = [rates.get(name, 0.0) for rates in by_layer for name in layers] or [0.0]
        acted = {"active steps": f"{group.mean('active_steps') / group.mean('steps'):.0%}"}
        acted |= {"layers": f"{len(layers)} of {len(by_layer[0])}", "drop rate": f"{fmean(rates):.3f}"}
        rows.append(row | (acted if any(by_layer) else dict.fromkeys(acted, "none")))
    return Table.of(rows)


def equal_time(compared: Sequence[Contrast]) -> Table:
    """A method's score minus the score of the baseline with the same training time."""
    rows = []
    for contrast in compared:
        mine, longer = contrast.mine, contrast.other
        times = {"baseline time (s)": f"{longer.training_time:.0f}"}
        times["time ratio"] = f"{longer.training_time / mine.training_time:.2f}"
        means = {"baseline mean": f"{fmean(longer.scores):.4f}", **contrast.cells}
        rows.append({"method": mine.name, "longer baseline": longer.name, **times, **means})
    return Table.of(rows, texts=(0, 1))


def options(comparison: Comparison, groups: Sequence[Group]) -> Table:
    """The options of the methods, and the number of combinations that were tried to select them."""
    rows, methods = [], {method.name: method for method in comparison.methods}
    has_aliases = any(method.alias for method in comparison.methods)
    for group in groups:
        method, config = methods[group.name], group.first["config"]
        values = {**{name: config[name] for name in not_common(groups)}, **config["own"]}
        flag = group.runs[0].settings.flag
        flags = " ".join(filter(None, (as_typed(flag(name), value) for name, value in values.items())))
        tries = str(method.tries) if method.winner is None else f"{method.tries} ({method.winner.runs} runs)"
        alias = {"as given": method.text} if has_aliases else {}
        rows.append({"method": method.name, **alias, "options": flags or "none", "tries": tries})
    return Table.of(rows, texts=(0, 1, 2) if has_aliases else (0, 1))


def not_common(groups: Sequence[Group]) -> list[str]:
    """Names of the options of all recipes in which these runs differ."""
    configs = [group.first["config"] for group in groups]
    left_out = {"own", "recipe", "seed", *NO_OPTIONS}
    names = [name for name in configs[0] if name not in left_out]
    return [name for name in names if any(config[name] != configs[0][name] for config in configs)]


def tries(comparison: Comparison) -> Table | None:
    """The scores of the searched combinations on held-out rows; ``None`` if nothing was searched."""
    rows = []
    for method in comparison.methods:
        chosen = comparison.chosen(method)
        for trial in comparison.trials(method):
            mean, scores = score_cells(trial.scores)
            row = {"tried": trial.method.name, "mean on held-out rows": mean, f"seeds, from {FIRST_SEED}": scores}
            choice = "diverged" if trial.state == "failed" else "chosen" if trial.method == chosen else "no"
            rows.append({**row, "choice": choice})
    return Table.of(rows, texts=(0, 3)) if rows else None
