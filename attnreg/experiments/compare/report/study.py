"""The report of a study over several comparisons: the primary contrast, means over tasks, further data, files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attnreg._files import replaced_file
from attnreg.experiments.compare.contrast import LEVEL, ONE_SEED, Contrast, contrasts, difference_rows, p_cell
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.report.latex import latex
from attnreg.experiments.compare.report.tables import one_point
from attnreg.experiments.compare.statistics import (
    holm,
    mean_over_tasks,
    mean_ranks,
    practically_equal,
    probability_of_improvement,
)
from attnreg.experiments.compare.study import Study
from attnreg.experiments.results import document
from attnreg.experiments.results.document import Block, Contents, Heading, Paragraph, Picture, Reports, Table
from attnreg.experiments.results.plots.comparison import plot_forest

Groups = Mapping[str, Mapping[str, Group]]  # by comparison and method
_OVER_TASKS = (
    "The mean difference to the baseline is over tasks, with a bootstrap over tasks and seeds; with few tasks its "
    "interval is too narrow. P(improvement) is the probability that a run of the method scores higher than a run of "
    "the baseline on the same task (Agarwal et al., 2021). Ranks are over methods, 1 the best, for each task and seed."
)
_RUNGS = (
    "The best rung is the baseline with the highest score on held-out rows of train, in its search. Times of "
    "training are with the values that each search chose."
)


def write_study_report(study: Study) -> list[Table]:
    """Write the report of a study, ``results.csv`` and ``tables.tex``; return the tables to show."""
    found = {name: comparison.groups().values() for name, comparison in study.comparisons.items()}
    groups = {name: {group.name: group for group in some} for name, some in found.items() if some}
    if not groups:
        return []
    missing = [
        Paragraph(f"{name}: {text}") for name, comparison in study.comparisons.items() for text in comparison.missing()
    ]
    reported = groups if study.report_on is None else _scored_on(study, groups, study.report_on)
    blocks: list[Block] = [
        Heading(f"Study {study.folder.name}"),
        *_verdict(study, reported),
        *map(Paragraph, study.notes),
        *missing,
        Contents(),
    ]
    tables: list[tuple[str, Table]] = []
    primary = " (primary contrast)" if study.primary else ""
    on = f" on {study.report_on}" if study.report_on else ""
    for title, pictures, table, texts in (
        (f"Scores{on}: means over seeds", (), _scores(study, reported), ()),
        (f"Differences by task{primary}", _pictures(study, reported), _differences(study, reported), _tests(study)),
        ("Against the best rung", (), _against_best_rung(study, reported), [_RUNGS]),
        ("Over tasks", (), _across(study, reported), [_OVER_TASKS]),
        ("Scores on further data: means over seeds", (), _further(study, groups), ()),
        ("Published figures", (), _published(study, groups), ()),
    ):
        if table is not None:
            blocks += [Heading(title.partition(" (")[0]), *pictures, table, *map(Paragraph, texts)]
            tables.append((title, table))
    if study.published is not None:
        blocks += [Heading("The paper"), Paragraph(study.published.source)]
    blocks += [Heading("Each comparison")]
    blocks += [Reports({name: comparison.folder for name, comparison in study.comparisons.items() if name in groups})]
    study.folder.mkdir(parents=True, exist_ok=True)
    document.save(blocks, study.folder)
    with replaced_file(study.folder / "tables.tex") as file:
        file.write("\n".join(latex(table, title) for title, table in tables))
    document.save_csv(list(_csv_rows(study, groups)), study.folder / "results.csv")
    return [table for _, table in tables]


def _scored_on(study: Study, groups: Groups, name: str) -> Groups:
    """Return the groups with their scores on further data, and without the runs that have none."""
    made: dict[str, dict[str, Group]] = {}
    for task, methods in groups.items():
        scoring = next(each for each in study.score_on[task] if each.name == name)
        for method, group in methods.items():
            found = {run.seed: scoring.of(run) for run in group.runs}
            scores = {seed: float(metrics[group.metric]) for seed, metrics in found.items() if metrics is not None}
            if scores:
                runs = [run for run in group.runs if run.seed in scores]
                made.setdefault(task, {})[method] = Group(method, runs, scores)
    return made


def _declared(study: Study) -> list[tuple[str, str]]:
    """Return the pairs of methods whose differences were declared: the primary one, or else all with the baseline."""
    if study.primary is not None:
        return [study.primary]
    comparison = next(iter(study.comparisons.values()))
    return [(method.name, comparison.baseline.name) for method in comparison.methods if method != comparison.baseline]


def _by_task(groups: Groups, pair: tuple[str, str]) -> dict[str, Contrast]:
    """Return the contrast of two methods on each task."""
    both = {task: [methods[name] for name in pair] for task, methods in groups.items() if set(pair) <= methods.keys()}
    return {task: each for task, (mine, other) in both.items() for each in contrasts([(mine, other)])}


def _scores(study: Study, groups: Groups) -> Table:
    names = [method.name for method in next(iter(study.comparisons.values())).methods]
    rows = []
    for task, methods in groups.items():
        first = next(iter(methods.values()))
        cells = [_mean(methods[name].scores) if name in methods else "not run" for name in names]
        trivial = "none" if first.trivial is None or study.report_on else _mean(first.trivial[1])
        rows.append([task, first.metric.replace("_", " "), *cells, trivial])
    return Table(["task", "metric", *names, "trivial"], rows, texts=(0, 1))


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.4f}"


def _found(study: Study, groups: Groups) -> list[tuple[tuple[str, str], str, Contrast]]:
    """The declared pairs of methods, with the task and the difference on each."""
    return [(pair, task, each) for pair in _declared(study) for task, each in _by_task(groups, pair).items()]


def _verdict(study: Study, groups: Groups) -> list[Block]:
    """Say in one sentence which of the declared differences hold."""
    found = _found(study, groups)
    if not found:
        return []
    if max(len(each.gaps) for *_, each in found) < 2:
        return [Paragraph(ONE_SEED)]
    adjusted = holm([each.difference.p for *_, each in found])
    hold = [
        f"{' - '.join(pair)} on {task} ({each.difference.mean:+.4f})"
        for (pair, task, each), p in zip(found, adjusted, strict=True)
        if p < LEVEL
    ]
    if not hold:
        return [Paragraph(f"No difference found: none of {len(found)} holds after one correction over all of them.")]
    return [Paragraph(f"Of {len(found)} differences, {len(hold)} hold after correction: {'; '.join(hold)}.")]


def _differences(study: Study, groups: Groups) -> Table | None:
    """The declared differences on each task, with one correction over all of them."""
    found = _found(study, groups)
    if not found:
        return None
    header = ["difference of", "task", "difference", "95 % over seeds", "p", "p (Holm)"]
    cells = difference_rows([each for *_, each in found])
    rows = [[" - ".join(pair), task, *row] for (pair, task, _), row in zip(found, cells, strict=True)]
    if study.equivalence is not None:
        header.append(f"p (equal within {study.equivalence:g})")
        for row, (*_, each) in zip(rows, found, strict=True):
            equal = practically_equal(each.gaps, study.equivalence)
            row.append("1 seed" if math.isnan(equal) else p_cell(equal))
    return Table(header, rows, texts=(0, 1))


def _against_best_rung(study: Study, groups: Groups) -> Table | None:
    """Each method that is no rung minus the best rung of each task, with one correction over all of them."""
    found: list[tuple[list[str], Contrast]] = []
    for task, methods in groups.items():
        rung = study.comparisons[task].best_of(study.rungs) if study.rungs else None
        others = [name for name in methods if name not in study.rungs] if rung in methods else []
        for name, other in ((name, methods[rung]) for name in others if rung is not None):
            time = methods[name].training_time / other.training_time
            found += [([task, name, other.name, f"{time:.2f}"], each) for each in contrasts([(methods[name], other)])]
    header = ["task", "method", "best rung", "time / rung's", "difference", "95 % over seeds", "p", "p (Holm)"]
    cells = difference_rows([each for _, each in found])
    rows = [[*names, *row] for (names, _), row in zip(found, cells, strict=True)]
    return Table(header, rows, texts=(0, 1, 2)) if rows else None


def _across(study: Study, groups: Groups) -> Table | None:
    """Means over tasks, with only the seeds that all methods have; ``None`` for a single task or method."""
    comparison = next(iter(study.comparisons.values()))
    if len(groups) < 2 or len(comparison.methods) < 2:
        return None
    names = [method.name for method in comparison.methods if all(method.name in methods for methods in groups.values())]
    whole = groups if comparison.baseline.name in names else {}
    seeds = {task: set.intersection(*({run.seed for run in methods[name].runs} for name in names))
             for task, methods in whole.items()}  # fmt: skip
    whole = {task: methods for task, methods in whole.items() if seeds[task]}
    if not whole:
        return None
    scores = [
        [[s for run, s in zip(methods[name].runs, methods[name].scores, strict=True) if run.seed in seeds[task]]
         for name in names] for task, methods in whole.items()
    ]  # fmt: skip
    ranks, base = mean_ranks(scores), names.index(comparison.baseline.name)
    rows = []
    for number, name in enumerate(names):
        mine, plain = [task[number] for task in scores], [task[base] for task in scores]
        cells = ["baseline"] * 3
        if number != base:
            mean, low, high = mean_over_tasks([np.subtract(a, b) for a, b in zip(mine, plain, strict=True)])
            interval = "1 task" if math.isnan(low) else f"[{low:+.4f}, {high:+.4f}]"
            cells = [f"{mean:+.4f}", interval, f"{probability_of_improvement(mine, plain):.2f}"]
        rows.append([name, *cells, f"{ranks[number]:.2f}"])
    header = ["method", "mean difference", "95 % over tasks and seeds", "P(improvement)", "mean rank"]
    return Table(header, rows)


def _further(study: Study, groups: Groups) -> Table | None:
    rows = []
    for task, methods in groups.items():
        for scoring in study.score_on.get(task, ()):
            for name, group in methods.items():
                found = [scoring.of(run) for run in group.runs]
                known = [each[group.metric] for each in found if each is not None and group.metric in each]
                text = _mean(known) if known else "not scored"
                rows.append([task, scoring.name, name, text, f"{len(known)} of {len(found)}", _mean(group.scores)])
    header = ["task", "scored on", "method", "mean", "seeds", "on dev"]
    return Table(header, rows, texts=(0, 1, 2)) if rows else None


def _published(study: Study, groups: Groups) -> Table | None:
    """The figures of a paper beside the measured means, as percentages where the paper has them so."""
    if study.published is None or not study.published.figures:
        return None
    rows = []
    for task, methods in groups.items():
        scorings = {scoring.name: scoring for scoring in study.score_on.get(task, ())}
        for method, figures in study.published.figures.get(task, {}).items():
            for data, figure in figures.items():
                group = methods.get(method)
                metric = study.published.metrics.get(task) or (group.metric if group else "")
                measured, seeds = "not run", "0"
                if group is not None:
                    found = [
                        run.result["dev"] if data == "dev" else scorings[data].of(run) if data in scorings else None
                        for run in group.runs
                    ]
                    scale = 1 / one_point(group)
                    values = [scale * each[metric] for each in found if each is not None and metric in each]
                    measured, seeds = f"{np.mean(values):.1f}" if values else "not scored", str(len(values))
                rows.append([task, method, data, f"{figure:.1f}", measured, seeds])
    return Table(["task", "method", "data", "published", "measured", "seeds"], rows, texts=(0, 1, 2))


def _pictures(study: Study, groups: Groups) -> Iterator[Picture]:
    for number, pair in enumerate(_declared(study), 1):
        if found := _by_task(groups, pair):
            estimates = {task: each.difference.estimate for task, each in found.items()}
            metrics = dict.fromkeys(each.mine.metric for each in found.values())
            path = study.folder / "plots" / f"difference-{number}.png"
            plot_forest(estimates, pair[1], " or ".join(metrics), path)
            yield Picture(path, f"{pair[0]} minus {pair[1]} by task, with 95 % intervals over seeds.")


def _tests(study: Study) -> Iterator[str]:
    """Explain the tests of the differences by task."""
    what = "the primary contrast, declared in the study file," if study.primary else "all methods"
    yield f"Student's paired t-test over seeds. p (Holm) is corrected over {what} and all tasks of this table."
    if study.equivalence is not None:
        yield (
            f"p (equal within {study.equivalence:g}) is of two one-sided tests: if it is small, the true difference "
            f"is less than {study.equivalence:g} either way, which the study file calls equal in practice."
        )


def _csv_rows(study: Study, groups: Groups) -> Iterator[dict[str, object]]:
    """Yield one row per score, which tools for comparing classifiers can pivot."""
    for task, methods in groups.items():
        for name, group in methods.items():
            for run in group.runs:
                row, environment = {"task": task, "method": name, "seed": run.seed}, run.result["environment"]
                yield {**row, "scored_on": "dev", "metric": group.metric, "score": run.score, **environment}
                for scoring in study.score_on.get(task, ()):
                    for metric, value in (scoring.of(run) or {}).items():
                        yield {**row, "scored_on": scoring.name, "metric": metric, "score": value, **environment}
