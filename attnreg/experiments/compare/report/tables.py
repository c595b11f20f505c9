"""The tables of a comparison's report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, stdev

from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.contrast import Contrast
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.held_out import score_cells
from attnreg.experiments.compare.statistics import bootstrap_over_rows, detectable, seeds_needed
from attnreg.experiments.options.option import as_typed
from attnreg.experiments.results.document import Table
from attnreg.experiments.tasks.metrics import CONFUSION


def table(rows: Sequence[Mapping[str, str]], texts: Collection[int] = (0,)) -> Table:
    """Return a table of rows by column; what a row lacks is "none"."""
    header = list(dict.fromkeys(column for row in rows for column in row))
    return Table(header, [[row.get(column, "none") for column in header] for row in rows], texts)


def scores(groups: Sequence[Group], baseline: Group) -> Table:
    """Mean, standard deviation, the score of every seed, and collapsed networks; last, the trivial predictor."""
    seeds, marked = f"seeds, from {groups[0].runs[0].seed}", any(group.collapsed for group in groups)
    known = [(group.name, group.scores, seeds_of(group.collapsed)) for group in groups]
    known += [] if baseline.trivial is None else [(*baseline.trivial, "constant")]
    rows = []
    for name, values, mark in known:
        mean, each = score_cells(values)
        deviation = f"{stdev(values):.4f}" if len(values) > 1 else "1 seed"
        row = {"method": name, "mean": mean, "SD": deviation, seeds: each}
        rows.append(row | ({"collapsed": mark} if marked else {}))
    return table(rows, texts=(0, 3, 4))


def differences(found: Sequence[Contrast], baseline: Group) -> Table:
    """Each method's score minus the baseline's, paired by seed."""
    rows, point = [], one_point(baseline)
    for each in found:
        row = {"method": each.mine.name, **each.cells}
        if baseline.counts_rows:
            predictions = each.mine.predictions, each.other.predictions
            low, high = bootstrap_over_rows(CONFUSION[each.mine.metric], each.other.labels, *predictions)
            row["95 % over dev rows"] = f"[{low:+.4f}, {high:+.4f}]"
        row["detectable"], row[f"seeds for {point:g}"] = _power(each.gaps, point)
        rows.append(row)
    return table(rows)


def one_point(group: Group) -> float:
    """Return one point of the metric: 0.01, or 1 for a metric whose best score is 100."""
    return 1.0 if group.bounds[1] == 100 else 0.01


def _power(gaps: Sequence[float], point: float) -> tuple[str, str]:
    """Return the difference that a test over these seeds would find, and how many seeds would find one of a point."""
    if len(gaps) < 2:
        return "1 seed", "1 seed"
    deviation = stdev(gaps)
    if deviation < 1e-12:  # which says nothing about other seeds
        return "all equal", "all equal"
    return f"{detectable(deviation, len(gaps)):.4f}", str(seeds_needed(point, deviation) or "over 100000")


def fit(groups: Sequence[Group], baseline: Group) -> Table:
    """Scores, losses, calibration, and what became of training rows with a wrong label; last, the trivial predictor."""
    noisy = any(group.first.get("mislabelled") for group in groups)
    rows = []
    for group in groups:
        row = {"method": group.name, **_gap(*(group.mean(split, group.metric) for split in ("train", "dev")))}
        row |= {f"{split} loss": f"{group.mean(split, 'loss'):.3f}" for split in ("train", "dev")}
        row["calibration error"] = f"{group.mean('dev', 'calibration_error'):.3f}" if group.calibrated else "none"
        if group.first.get("other_text"):
            row["forgetting"] = f"{group.mean('other_text', 'forgetting'):+.4f}"
        for name in ("memorized", "recovered") if noisy else ():
            row[name] = f"{group.mean('mislabelled', name):.3f}" if group.first.get("mislabelled") else "no noise"
        rows.append(row)
    if baseline.trivial is not None:
        both = (baseline.mean("trivial", split, baseline.metric) for split in ("train", "dev"))
        rows.append({"method": baseline.trivial[0], **_gap(*both)})
    return table(rows)


def _gap(train: float, dev: float) -> dict[str, str]:
    return {"train": f"{train:.4f}", "dev": f"{dev:.4f}", "gap": f"{train - dev:+.4f}"}


def cost(groups: Sequence[Group], baseline: Group) -> Table:
    """Time, memory and passes relative to the baseline, and the drop rate."""
    measured = {"memory": "peak_memory_bytes", "forward": "forward_rows", "backward": "backward_rows"}
    rows = []
    for group in groups:
        pairs = {"time": (group.training_time, baseline.training_time)}
        pairs |= {name: (group.mean(key), baseline.mean(key)) for name, key in measured.items()}
        row = {"method": group.name, "training time (s)": f"{group.training_time:.0f}"}
        for name, (mine, plain) in pairs.items():  # 0: memory on some systems, passes of a network without logits
            row[f"{name} ratio"] = f"{mine / plain:.2f}" if plain else "not measured"
        by_layer = [result["drop_rates"] for result in group.results]
        layers = {name for rates in by_layer for name, rate in rates.items() if rate > 0}
        rates = [rates.get(name, 0.0) for rates in by_layer for name in layers] or [0.0]
        acted = {"active steps": f"{group.mean('active_steps') / group.mean('steps'):.0%}"}
        acted |= {"layers": f"{len(layers)} of {len(by_layer[0])}", "drop rate": f"{fmean(rates):.3f}"}
        rows.append(row | (acted if any(by_layer) else dict.fromkeys(acted, "none")))
    return table(rows)


def equal_time(found: Sequence[Contrast]) -> Table:
    """Each method's score minus that of the baseline with the same training time."""
    rows = []
    for each in found:
        mine, longer = each.mine, each.other
        times = {"baseline time (s)": f"{longer.training_time:.0f}"}
        times["time ratio"] = f"{longer.training_time / mine.training_time:.2f}"
        means = {"baseline mean": f"{fmean(longer.scores):.4f}", **each.cells}
        rows.append({"method": mine.name, "longer baseline": longer.name, **times, **means})
    return table(rows, texts=(0, 1))


def options(comparison: Comparison, groups: Sequence[Group]) -> Table:
    """The options of each method, and the number of combinations that were tried to select them."""
    rows, methods = [], {method.name: method for method in comparison.methods}
    has_aliases = any(method.alias for method in comparison.methods)
    for group in groups:
        method, config = methods[group.name], group.first["config"]
        values = {**{name: config[name] for name in not_common(groups)}, **config["own"]}
        flag = group.runs[0].settings.flag
        told = " ".join(filter(None, (as_typed(flag(name), value) for name, value in values.items())))
        tries = str(method.tries) if method.winner is None else f"{method.tries} ({method.winner.runs} runs)"
        given = {"as given": method.text} if has_aliases else {}
        rows.append({"method": method.name, **given, "options": told or "none", "tries": tries})
    return table(rows, texts=(0, 1, 2) if has_aliases else (0, 1))


def not_common(groups: Sequence[Group]) -> list[str]:
    """Names of the shared options (those of all recipes) in which these runs differ."""
    configs = [group.first["config"] for group in groups]
    left_out = {"own", "recipe", "attnreg", "content"}
    return [name for name in configs[0] if name not in left_out and any(c[name] != configs[0][name] for c in configs)]


def tries(comparison: Comparison) -> Table | None:
    """The score of each searched combination on held-out rows; ``None`` if nothing was searched."""
    found: list[tuple[str, Sequence[float], str]] = []
    runs = []
    for method in comparison.methods:
        chosen = comparison.chosen(method)
        scored = [trial for trial in comparison.trials(method) if trial.scores]
        found += [(each.method.name, each.scores, "chosen" if each.method == chosen else "no") for each in scored]
        runs += comparison.search_runs(method)
    if not found:
        return None
    finished = [run for run in runs if run.finished]
    first = Group("", [run for run in finished if run.method == finished[0].method])
    found += [] if first.trivial is None else [(*first.trivial, "no")]
    columns = ("tried", "mean on held-out rows", "seeds, from 1000", "choice")
    return Table(columns, [[name, *score_cells(values), choice] for name, values, choice in found], texts=(0, 3))


def seeds_of(seeds: Sequence[int]) -> str:
    """Name seeds, as in "seed 0" or "seeds 0, 2"; "no" for none of them."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else "no"
