"""The tables of a comparison's report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.contrast import Contrast, difference_rows
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.held_out import score_cells
from attnreg.experiments.compare.planned import finished_of
from attnreg.experiments.compare.statistics import bootstrap_over_rows, detectable, seeds_needed
from attnreg.experiments.options.option import as_typed
from attnreg.experiments.results.document import Table
from attnreg.experiments.tasks.metrics import CONFUSION, METRICS


def scores(groups: Sequence[Group], baseline: Group) -> Table:
    """Mean, standard deviation, the score of every seed, and collapsed networks; last, the trivial predictor."""
    header = ["method", "mean", "SD", f"seeds, from {groups[0].runs[0].seed}"]
    trivial = [] if baseline.trivial is None else [baseline.trivial]
    rows = []
    for name, values in [*((group.name, group.scores) for group in groups), *trivial]:
        mean, each = score_cells(values)
        rows.append([name, mean, f"{stdev(values):.4f}" if len(values) > 1 else "1 seed", each])
    if any(group.collapsed for group in groups):
        header.append("collapsed")
        for row, group in zip(rows, groups, strict=False):
            row.append(seeds_of(group.collapsed) if group.collapsed else "no")
        rows[len(groups) :] = [[*row, "constant"] for row in rows[len(groups) :]]
    return Table(header, rows, texts=(0, 3, 4))


def differences(found: Sequence[Contrast], baseline: Group) -> Table:
    """Each method's score minus the baseline's, paired by seed."""
    header = ["method", "difference", "95 % over seeds", "p", "p (Holm)"]
    rows = [[each.mine.name, *cells] for each, cells in zip(found, difference_rows(found), strict=True)]
    if baseline.counts_rows:
        header.append("95 % over dev rows")
        for row, each in zip(rows, found, strict=True):
            predictions = each.mine.predictions, each.other.predictions
            low, high = bootstrap_over_rows(CONFUSION[each.mine.metric], each.other.labels, *predictions)
            row.append(f"[{low:+.4f}, {high:+.4f}]")
    point = one_point(baseline)
    header += ["detectable", f"seeds for {point:g}"]
    for row, each in zip(rows, found, strict=True):
        row += _power(each.gaps, point)
    return Table(header, rows)


def one_point(group: Group) -> float:
    """Return one point of the metric: 0.01, or 1 for a metric whose best score is 100."""
    metric = METRICS.get(group.metric)
    return 1.0 if metric is not None and metric.bounds[1] == 100 else 0.01


def _power(gaps: Sequence[float], point: float) -> list[str]:
    """Return the difference that a test over these seeds would find, and how many seeds would find one of a point."""
    if len(gaps) < 2:
        return ["1 seed", "1 seed"]
    deviation = stdev(gaps)
    if deviation < 1e-12:  # which says nothing about other seeds
        return ["all equal", "all equal"]
    needed = seeds_needed(point, deviation)
    return [f"{detectable(deviation, len(gaps)):.4f}", "over 100000" if needed is None else str(needed)]


def fit(groups: Sequence[Group], baseline: Group) -> Table:
    """Scores, losses, calibration, and what became of training rows with a wrong label; last, the trivial predictor."""
    header = ["method", "train", "dev", "gap", "train loss", "dev loss", "calibration error"]
    noisy, scored = (any(group.results[0].get(name) for group in groups) for name in ("mislabelled", "other_text"))
    header += ["forgetting"] if scored else []
    rows = []
    for group in groups:
        train, dev = group.mean("train", group.metric), group.mean("dev", group.metric)
        losses = [f"{group.mean(split, 'loss'):.3f}" for split in ("train", "dev")]
        calibration = f"{group.mean('dev', 'calibration_error'):.3f}" if group.calibrated else "none"
        rows.append([group.name, f"{train:.4f}", f"{dev:.4f}", f"{train - dev:+.4f}", *losses, calibration])
        if scored:
            measured = group.results[0].get("other_text")
            rows[-1].append(f"{group.mean('other_text', 'forgetting'):+.4f}" if measured else "none")
        if noisy:
            measured, names = group.results[0].get("mislabelled"), ("memorized", "recovered")
            rows[-1] += [f"{group.mean('mislabelled', name):.3f}" if measured else "no noise" for name in names]
    if baseline.trivial is not None:
        train, dev = (baseline.mean("trivial", split, baseline.metric) for split in ("train", "dev"))
        row = [baseline.trivial[0], f"{train:.4f}", f"{dev:.4f}", f"{train - dev:+.4f}"]
        rows.append([*row, *["none"] * (len(header) + 2 * noisy - len(row))])
    return Table([*header, "memorized", "recovered"] if noisy else header, rows)


def classes(groups: Sequence[Group], names: Sequence[str]) -> Table:
    """Precision, recall and F1 of each class, and its number of dev rows."""
    rows = []
    for group in groups:
        found = zip(names, group.class_scores(len(names)), strict=True)
        for number, (name, scores) in enumerate(found):
            size = int((group.labels == number).sum())
            rows.append([group.name, name, str(size), *(f"{score:.3f}" for score in scores)])
    return Table(["method", "class", "dev rows", "precision", "recall", "F1"], rows, texts=(0, 1))


def cost(groups: Sequence[Group], baseline: Group) -> Table:
    """Time, memory and passes relative to the baseline, and the drop rate."""
    header = [
        *("method", "training time (s)", "time ratio", "memory ratio", "forward ratio", "backward ratio"),
        *("active steps", "layers", "drop rate"),
    ]
    names = ["peak_memory_bytes", "forward_rows", "backward_rows"]
    rows = []
    for group in groups:
        # 0 stands for "not measured": memory on some systems, passes of a network without logits.
        pairs = [(group.training_time, baseline.training_time)]
        pairs += [(group.mean(name), baseline.mean(name)) for name in names]
        ratios = [f"{mine / plain:.2f}" if plain else "not measured" for mine, plain in pairs]
        active = f"{group.mean('active_steps') / group.mean('steps'):.0%}"
        by_layer = [result["drop_rates"] for result in group.results]
        layers = {name for rates in by_layer for name, rate in rates.items() if rate > 0}
        rates = [rates.get(name, 0.0) for rates in by_layer for name in layers] or [0.0]
        acted = [active, f"{len(layers)} of {len(by_layer[0])}", f"{sum(rates) / len(rates):.3f}"]
        seconds = f"{group.training_time:.0f}"
        rows.append([group.name, seconds, *ratios, *(acted if any(by_layer) else ["none", "none", "none"])])
    return Table(header, rows)


def equal_time(found: Sequence[Contrast]) -> Table:
    """Each method's score minus that of the baseline with the same training time."""
    header = [
        *("method", "longer baseline", "baseline time (s)", "time ratio", "baseline mean"),
        *("difference", "95 % over seeds", "p", "p (Holm)"),
    ]
    rows = []
    for each, cells in zip(found, difference_rows(found), strict=True):
        mine, longer = each.mine, each.other
        times = [f"{longer.training_time:.0f}", f"{longer.training_time / mine.training_time:.2f}"]
        rows.append([mine.name, longer.name, *times, f"{fmean(longer.scores):.4f}", *cells])
    return Table(header, rows, texts=(0, 1))


def options(comparison: Comparison, groups: Sequence[Group]) -> Table:
    """The options of each method, and the number of combinations that were tried to select them."""
    rows, methods = [], {method.name: method for method in comparison.methods}
    as_given = ["as given"] if any(method.alias for method in comparison.methods) else []
    for group in groups:
        method, config = methods[group.name], group.results[0]["config"]
        values = {**{name: config[name] for name in not_common(groups)}, **config["own"]}
        flag = group.runs[0].settings.flag
        told = " ".join(filter(None, (as_typed(flag(name), value) for name, value in values.items())))
        tries = str(method.tries) if method.winner is None else f"{method.tries} ({method.winner.runs} runs)"
        rows.append([method.name, *([method.text] if as_given else []), told or "none", tries])
    header = ["method", *as_given, "options", "tries"]
    return Table(header, rows, texts=range(len(header) - 1))


def not_common(groups: Sequence[Group]) -> list[str]:
    """Names of the shared options (those of all recipes) in which these runs differ."""
    configs = [group.results[0]["config"] for group in groups]
    left_out = {"own", "recipe", "attnreg", "content"}
    return [name for name in configs[0] if name not in left_out and any(c[name] != configs[0][name] for c in configs)]


def tries(comparison: Comparison) -> Table | None:
    """The score of each searched combination on held-out rows; ``None`` if nothing was searched."""
    rows: list[list[str]] = []
    for method in comparison.methods:
        chosen = comparison.chosen(method)
        scored = [trial for trial in comparison.trials(method) if trial.scores]
        rows += [[each.method.name, *each.cells, "chosen" if each.method == chosen else "no"] for each in scored]
    if not rows:
        return None
    runs = [run for method in comparison.methods for run in finished_of(comparison.search_runs(method))]
    runs = [run for run in runs if run.method == runs[0].method]
    if (trivial := Group("", runs).trivial) is not None:
        rows.append([trivial[0], *score_cells(trivial[1]), "no"])
    return Table(["tried", "mean on held-out rows", "seeds, from 1000", "choice"], rows, texts=(0, 3))


def seeds_of(seeds: Sequence[int]) -> str:
    """Name seeds, as in "seed 0" or "seeds 0, 2"."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
