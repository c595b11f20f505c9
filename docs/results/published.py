"""Every comparison that is published here, recomputed from the scores of each seed, with one correction over all.

`comparisons/comparisons.yaml` lists those of our own studies. A contributed study is a folder of `contributed/` with
the `study.yaml` that `attnreg compare --study` ran, and the `results.csv` that it wrote: its primary contrast, and each
method minus the baseline, on each of its tasks.
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy import optimize, stats

from attnreg.experiments.compare.statistics import Difference, detectable, holm, paired_difference
from attnreg.experiments.compare.study import read_study
from attnreg.experiments.options.settings import scored_rows, task_of

FOLDER = Path(__file__).parent
ALL = FOLDER / "comparisons" / "all.csv"
SHORT = {"all-MiniLM-L6-v2": "MiniLM", "multilingual-e5-small": "e5-small"}  # names of models
ENVIRONMENT = ("commit", "device", "cpu", "torch", "transformers")
TERM = re.compile(r"(?:^| ([+-]) )(\S+\.csv):(\w+)\[([^\]]*)\]")
SIGNS = {ord(sign): f"%{ord(sign):X}" for sign in "%&;[]"}  # of a formula, in a method that is an expression

Row = dict[str, Any]
FloatArray = NDArray[np.float64]


@cache
def table(path: str) -> list[dict[str, str]]:
    """Return the rows of a csv file of this folder."""
    with (FOLDER / path).open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def chosen(path: str, where: str) -> list[dict[str, str]]:
    """Return the rows of a table that have these values: ``NAME=VALUE & NAME=VALUE``."""
    wanted = dict(each.split("=", 1) for each in where.split(" & "))
    return [row for row in table(path) if all(row[name].translate(SIGNS) == value for name, value in wanted.items())]


def scores(formula: str) -> dict[int, float]:
    """Return the score of each seed: ``FILE:COLUMN[NAME=VALUE & ...]``, or a sum or difference of such terms."""
    found: list[dict[int, float]] = []
    for sign, path, column, where in TERM.findall(formula):
        rows = chosen(path, where)
        each = {int(row["seed"]): (-1 if sign == "-" else 1) * float(row[column]) for row in rows if row[column]}
        if not rows or len(each) < len(rows):
            raise SystemExit(f"{formula}: expected one score per seed, got {len(each)} of {len(rows)} rows")
        found.append(each)
    return {seed: sum(each[seed] for each in found) for seed in found[0] if all(seed in each for each in found)}


def paired(formulas: Sequence[str], setting: Row, contrast: str) -> tuple[list[int], list[FloatArray]]:
    """Return the seeds, and the scores of both methods ``(2, seeds)`` on each data set."""
    (first, last), found, seeds = setting.get("seeds", (0, 10**9)), [], list[int]()
    for pair in zip(*(each.split("; ") for each in formulas), strict=True):
        mine, other = map(scores, pair)
        both = sorted(seed for seed in {*mine} & {*other} if first <= seed <= last)
        if both != [*range(both[0], both[-1] + 1)] or seeds not in ([], both):
            raise SystemExit(f"{contrast}: expected seeds without gaps, alike on each data set, got {both}")
        seeds = both
        found.append(np.array([[each[seed] for seed in seeds] for each in (mine, other)]))
    return seeds, found


def pooled(gaps: Sequence[FloatArray]) -> tuple[Difference, float]:
    """Return the mean difference over data sets by a random-effects model, and the standard deviation of one.

    The variance between data sets is that of DerSimonian and Laird (1986, Equation 8); interval and p are those of
    Knapp and Hartung (2003), by Student's t over data sets, with a variance not below that of the model.
    """
    means, within = np.array([(each.mean(), each.var(ddof=1) / len(each)) for each in gaps]).T
    weights, free = 1 / within, len(means) - 1
    spread = weights @ (means - np.average(means, weights=weights)) ** 2
    between = max(0.0, (spread - free) / (weights.sum() - weights @ weights / weights.sum()))
    weights = 1 / (within + between)
    mean = np.average(means, weights=weights)
    error = float(np.sqrt(max(1.0, weights @ (means - mean) ** 2 / free) / weights.sum()))
    half, p = stats.t.ppf(0.975, free) * error, 2 * stats.t.sf(abs(mean) / error, free)
    return Difference(*map(float, (mean, mean - half, mean + half, p))), error * len(means) ** 0.5


def crossed(gaps: Mapping[tuple[str, str], FloatArray]) -> tuple[Difference, tuple[float, float]]:
    """Return the mean difference over data sets and models, and the 95 % interval for a new data set and model.

    ``gaps`` has the differences of the seeds of each ``(data set, model)``. Data set, model and their interaction are
    random; their variances are estimated by restricted maximum likelihood, that of the means of seeds is known
    (Hartung, Knapp and Sinha, Statistical Meta-Analysis with Applications, 2008, Chapter 7): one for all, since few
    seeds do not tell those of each apart. With one seed of each, what seeds change is a part of the interaction.
    Intervals and p are by Student's t with as many degrees of freedom as there are data sets, less one.
    """
    places, means = [*gaps], np.array([each.mean() for each in gaps.values()])
    within = float(np.mean([each.var(ddof=1) / len(each) if len(each) > 1 else 0.0 for each in gaps.values()]))
    alike = [np.array([[float(a[k] == b[k]) for b in places] for a in places]) for k in (0, 1)]
    unit = within + means.var()  # so that the optimizer's steps suit all scales

    def fitted(between: FloatArray) -> tuple[float, float, float]:
        data_set, model, cell = between * unit
        inverse = np.linalg.inv((within + cell) * np.eye(len(means)) + data_set * alike[0] + model * alike[1])
        weight = inverse.sum()
        mean = inverse.sum(0) @ means / weight
        loss = (means - mean) @ inverse @ (means - mean) + np.log(weight) - np.linalg.slogdet(inverse)[1]
        return float(loss), float(mean), float(1 / weight)

    least = (0.0, 0.0, 0.0 if within else 1e-6)  # else a covariance would be singular
    bounds = [(each, None) for each in least]
    starts = [np.maximum(each, least) for each in itertools.product((0.0, 0.5), repeat=3)]
    # So exact that the digits that are printed are the same on all processors.
    tries = [
        optimize.minimize(lambda b: fitted(b)[0], start, bounds=bounds, jac="3-point", tol=1e-14) for start in starts
    ]
    between = min(tries, key=lambda each: float(each.fun)).x
    _, mean, variance = fitted(between)
    free = len({data_set for data_set, _ in places}) - 1
    t, error = stats.t.ppf(0.975, free), variance**0.5
    wide = t * (variance + between.sum() * unit) ** 0.5
    p = 2 * stats.t.sf(abs(mean) / error, free)
    return Difference(*map(float, (mean, mean - t * error, mean + t * error, p))), (mean - wide, mean + wide)


def contributed(folder: Path) -> Iterator[Row]:
    """Yield the settings of a contributed study, one for each of its tasks."""
    study = read_study(folder / "study.yaml")
    primary = study.primary or ()
    for name, each in study.comparisons.items():
        task, data = task_of(each.options), study.report_on or scored_rows(each.options)
        train_size = each.options.get("train_size", "all")
        place, model = Path(str(each.options.get("data_dir", ""))).name, str(each.options.get("model", "tiny BERT"))
        of_task = f"-train_size={train_size}", f"-model={model.replace('/', '_')}"  # in names of comparisons
        title = functools.reduce(lambda text, part: text.replace(part, ""), of_task, name)
        model = Path(model).name
        baseline, methods = each.baseline.name, [method.name for method in each.methods]
        others = [(method, baseline) for method in methods if method != baseline and {method, baseline} != {*primary}]
        yield {
            "study": f"contributed/{folder.name}",
            "setting": f"{folder.name}: {title}, {train_size} rows, {{}} seeds",
            "board": f"{title}, {train_size} rows",
            "data": place or task.name,
            "rows": "phrases → sentences" if task.name == "sst2" and place != "sst2_sentences" else "",
            "metric": task.metric.replace("_", " "),
            "model": SHORT.get(model, model),
            "train_size": train_size,
            "table": (folder / "results.csv").relative_to(FOLDER).as_posix(),
            "where": {"task": name, "scored_on": data, "metric": task.metric},
            "methods": {method: method for method in methods},
            "primary": [" - ".join(primary)] if primary else [],
            "contrasts": [" - ".join(pair) for pair in others],
        }


def settings() -> list[Row]:
    """Return what is compared: our own studies, then contributed ones."""
    own = yaml.safe_load((FOLDER / "comparisons" / "comparisons.yaml").read_text(encoding="utf-8"))["settings"]
    others = (contributed(path.parent) for path in sorted(FOLDER.glob("contributed/*/study.yaml")))
    return [*own, *(setting for each in others for setting in each)]


def formula(setting: Row, method: str) -> str:
    """Return where the scores of a method stand, for each data set of those that are pooled."""
    named = setting["methods"][method]
    if ".csv:" in named:
        return str(named)
    if "pooled" in setting:
        alone = {name: value for name, value in setting.items() if name != "pooled"}
        tasks = [{**alone, "where": {**setting["where"], "task": task}} for task in setting["pooled"]]
        return "; ".join(formula(each, method) for each in tasks)
    where = {"method": named, **setting.get("where", {})}
    values = " & ".join(f"{name}={str(value).translate(SIGNS)}" for name, value in where.items())
    return f"{setting['table']}:{setting.get('score', 'score')}[{values}]"


def environment(formulas: list[str], setting: Row) -> Row:
    """Return what the tables, or else the list, say of commit, device, CPU, torch and transformers."""
    each = [part for formula in formulas for part in formula.split("; ")]
    used = [row for part in each for _, path, _, where in TERM.findall(part) for row in chosen(path, where)]
    told = {name: sorted({row[name] for row in used if row.get(name)}) for name in ENVIRONMENT}
    return {name: "; ".join(found) or setting.get(name, "") for name, found in told.items()}


def of_cells(setting: Row, gaps: Sequence[FloatArray]) -> dict[tuple[str, str], FloatArray]:
    """Return the differences of each ``(data set, model)``: the mean of data sets that count as one."""
    cells: dict[tuple[str, str], list[FloatArray]] = {}
    for task, each in zip(setting["pooled"], gaps, strict=True):
        data, model = task.split("-model=")
        cells.setdefault((setting["crossed"].get(data, data), model), []).append(each)
    return {place: np.mean(each, axis=0) for place, each in cells.items()}


def comparison(setting: Row, contrast: str) -> Row:
    """Return one line of the file of all comparisons, without what is corrected over all."""
    method, baseline = contrast.split(" - ")
    formulas = [formula(setting, name) for name in (method, baseline)]
    seeds, pairs = paired(formulas, setting, contrast)
    gaps = [mine - other for mine, other in pairs]
    new = (np.nan, np.nan)
    if "crossed" in setting:
        cells = of_cells(setting, gaps)
        (found, new), units = crossed(cells), len({data for data, _ in cells})
        deviation = (found.high - found.low) / 2 / float(stats.t.ppf(0.975, units - 1)) * units**0.5
    elif len(pairs) > 1:
        (found, deviation), units = pooled(gaps), len(pairs)
    else:
        found, units = paired_difference(*pairs[0]), len(seeds)
        deviation = np.nan if np.isnan(found.p) else float(gaps[0].std(ddof=1))  # one seed, or the same gap in all
    if len(pairs) > 1 and np.isnan(found.p):
        raise SystemExit(f"{setting['study']}, {contrast}: expected at least two seeds with different gaps")
    return {
        "study": setting["study"],
        "setting": setting["setting"].format(len(seeds)),
        "board": setting.get("board", ""),
        "data": setting["data"],
        "rows": setting["rows"],
        "train_size": setting["train_size"],
        "metric": setting["metric"],
        "model": setting["model"],
        "method": method,
        "baseline": baseline,
        "matched": setting.get("matched", ""),
        "seeds": len(seeds),
        "first_seed": seeds[0],
        "difference": found.mean,
        "low": found.low,
        "high": found.high,
        "new_low": new[0],
        "new_high": new[1],
        "p": found.p,
        "p_holm": np.nan,
        "detectable": detectable(deviation, units),
        "planned": "primary" if contrast in setting.get("primary", ()) else "secondary",
        "extension": setting.get("extension", ""),
        **environment(formulas, setting),
        "scores": formulas[0],
        "baseline_scores": formulas[1],
    }


def comparisons() -> list[Row]:
    """Return all comparisons, with p corrected over all of them (Holm)."""
    each = ((setting, contrast) for setting in settings() for contrast in names(setting))
    rows = [comparison(setting, contrast) for setting, contrast in each]
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = adjusted
    return rows


def names(setting: Row) -> list[str]:
    """Return the contrasts of a setting, primary ones first."""
    return [*setting.get("primary", ()), *setting["contrasts"]]


def write(rows: list[Row], path: Path = ALL) -> None:
    """Write the file of all comparisons."""

    def shown(cell: Any) -> Any:
        return cell if not isinstance(cell, float) else "" if np.isnan(cell) else f"{cell:.6g}"

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: shown(cell) for name, cell in row.items()} for row in rows)
