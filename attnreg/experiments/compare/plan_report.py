"""The report of a study over several comparisons: the primary contrast, means over tasks, further data, files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attnreg._files import replaced_file
from attnreg.experiments.compare import document
from attnreg.experiments.compare.statistics import mean_over_tasks, mean_ranks, probability_of_improvement
from attnreg.experiments.compare.document import Block, Contents, Heading, Paragraph, Picture, Reports, Table
from attnreg.experiments.compare.group import Group, paired
from attnreg.experiments.compare.incomplete import incomplete
from attnreg.experiments.compare.latex import latex
from attnreg.experiments.compare.plan import Plan
from attnreg.experiments.compare.planned import finished_of
from attnreg.experiments.compare.statistics import practically_equal
from attnreg.experiments.compare.scoring import score_on
from attnreg.experiments.compare.statistics import Difference, holm, paired_difference
from attnreg.experiments.compare.study import Study
from attnreg.experiments.compare.tables import difference_cells, p_cell
from attnreg.experiments.results.plots.comparison import plot_forest
from attnreg.experiments.results.plots.style import dark_path

Groups = Mapping[str, Mapping[str, Group]]  # by comparison and method


def write_plan_report(plan: Plan) -> list[Table]:
    """Write the report of a study, ``results.csv`` and ``tables.tex``; return the tables to show."""
    groups = {name: _groups(study) for name, study in plan.studies.items()}
    groups = {name: methods for name, methods in groups.items() if methods}
    if not groups:
        return []
    tables: list[tuple[str, Table]] = [("Scores: means over seeds", _scores(plan, groups))]
    if (declared := _declared(plan, groups)) is not None:
        tables.append((f"Differences by task{_holm_over(plan)}", declared))
    if len(groups) > 1 and (across := _across(plan, groups)) is not None:
        tables.append(("Over tasks", across))
    if (further := _further(plan, groups)) is not None:
        tables.append(("Scores on further data: means over seeds", further))
    blocks: list[Block] = [Heading(f"Study {plan.folder.name}"), *_missing(plan), Contents()]
    pictures = list(_pictures(plan, groups))
    for title, table in tables:
        blocks += [Heading(title.partition(" (")[0]), *(pictures if table is declared else []), table]
        blocks += [Paragraph(text) for text in _explained(plan, table, declared)]
    blocks += [Heading("Each comparison")]
    blocks += [Reports({name: study.folder for name, study in plan.studies.items() if name in groups})]
    plan.folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "report.md": document.markdown(blocks, plan.folder),
        "report.html": document.self_contained_html(blocks),
        "tables.tex": "\n".join(latex(table, title) for title, table in tables),
    }
    for name, content in contents.items():
        with replaced_file(plan.folder / name) as file:
            file.write(content)
    _write_csv(plan, groups)
    return [table for _, table in tables]


def _groups(study: Study) -> dict[str, Group]:
    chosen = {method.name: study.chosen(method) for method in study.methods}
    runs = {name: finished_of(study.final_runs(method)) for name, method in chosen.items() if method is not None}
    return {name: Group(name, some) for name, some in runs.items() if some}


def _missing(plan: Plan) -> Iterator[Paragraph]:
    for name, study in plan.studies.items():
        for block in incomplete(study):
            yield Paragraph(f"{name}: {block.text}")


def _contrasts(plan: Plan) -> list[tuple[str, str]]:
    """Return the differences that were declared: the primary one, or else all to the baseline."""
    if plan.primary is not None:
        return [plan.primary]
    study = next(iter(plan.studies.values()))
    return [(method.name, study.baseline.name) for method in study.methods if method != study.baseline]


def _gaps(groups: Groups, contrast: tuple[str, str]) -> dict[str, tuple[Group, Group]]:
    """Return both methods on each task, with the seeds that both have."""
    found = {}
    for name, methods in groups.items():
        if set(contrast) <= methods.keys() and (pair := paired([methods[contrast[0]]], [methods[contrast[1]]])):
            found[name] = pair[0]
    return found


def _subtracted(mine: Group, theirs: Group) -> list[float]:
    return [a - b for a, b in zip(mine.scores, theirs.scores, strict=True)]


def _scores(plan: Plan, groups: Groups) -> Table:
    names = [method.name for method in next(iter(plan.studies.values())).methods]
    rows = []
    for task, methods in groups.items():
        metric = next(iter(methods.values())).metric
        cells = [_mean(methods[name].scores) if name in methods else "not run" for name in names]
        trivial = next(iter(methods.values())).trivial
        rows.append([task, metric.replace("_", " "), *cells, "none" if trivial is None else _mean(trivial[1])])
    return Table(["task", "metric", *names, "trivial"], rows, texts=(0, 1))


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.4f}"


def _declared(plan: Plan, groups: Groups) -> Table | None:
    """The declared differences on each task, with one correction over all of them."""
    rows, results, counts, equal = [], list[Difference](), [], []
    for contrast in _contrasts(plan):
        for task, (mine, theirs) in _gaps(groups, contrast).items():
            gaps = _subtracted(mine, theirs)
            results.append(paired_difference(mine.scores, theirs.scores))
            counts.append(len(gaps))
            rows.append([f"{contrast[0]} - {contrast[1]}", task])
            equal.append([] if plan.equivalence is None else [_p_or_reason(practically_equal(gaps, plan.equivalence))])
    if not rows:
        return None
    adjusted = holm([result.p for result in results])
    cells = zip(rows, results, adjusted, counts, equal, strict=True)
    header = ["difference of", "task", "difference", "95 % over seeds", "p", "p (Holm)"]
    header += [] if plan.equivalence is None else [f"p (equal within {plan.equivalence:g})"]
    full = [[*row, *difference_cells(result, p, seeds), *same] for row, result, p, seeds, same in cells]
    return Table(header, full, texts=(0, 1))


def _p_or_reason(value: float) -> str:
    return "1 seed" if math.isnan(value) else p_cell(value)


def _across(plan: Plan, groups: Groups) -> Table | None:
    study = next(iter(plan.studies.values()))
    names = [method.name for method in study.methods if all(method.name in methods for methods in groups.values())]
    whole = groups if study.baseline.name in names else {}
    seeds = {task: set.intersection(*({run.seed for run in methods[name].runs} for name in names))
             for task, methods in whole.items()}  # fmt: skip
    whole = {task: methods for task, methods in whole.items() if seeds[task]}
    if not whole:
        return None
    scores = [
        [[run.score for run in methods[name].runs if run.seed in seeds[task]] for name in names]
        for task, methods in whole.items()
    ]
    ranks, base = mean_ranks(scores), names.index(study.baseline.name)
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


def _further(plan: Plan, groups: Groups) -> Table | None:
    rows = []
    for task, methods in groups.items():
        for scoring in plan.score_on.get(task, ()):
            for name, group in methods.items():
                found = [score_on(run, scoring) for run in group.runs]
                known = [each[group.metric] for each in found if each is not None and group.metric in each]
                text = _mean(known) if known else "not scored"
                rows.append([task, scoring.name, name, text, f"{len(known)} of {len(found)}", _mean(group.scores)])
    header = ["task", "scored on", "method", "mean", "seeds", "on dev"]
    return Table(header, rows, texts=(0, 1, 2)) if rows else None


def _pictures(plan: Plan, groups: Groups) -> Iterator[Picture]:
    for number, contrast in enumerate(_contrasts(plan)):
        if found := _gaps(groups, contrast):
            results = {task: paired_difference(mine.scores, other.scores) for task, (mine, other) in found.items()}
            estimates = {task: (each.mean, each.low, each.high) for task, each in results.items()}
            path = plan.folder / "plots" / f"difference-{number + 1}.png"
            metrics = dict.fromkeys(mine.metric for mine, _ in found.values())
            plot_forest(estimates, contrast[1], " or ".join(metrics), path)
            text = f"{contrast[0]} minus {contrast[1]} by task, with 95 % intervals over seeds."
            yield Picture(path, text, dark_path(path))


def _holm_over(plan: Plan) -> str:
    return " (primary contrast)" if plan.primary is not None else ""


def _explained(plan: Plan, table: Table, declared: Table | None) -> Iterator[str]:
    if table is declared:
        what = "the primary contrast, declared in the study file," if plan.primary else "all methods"
        yield f"Student's paired t-test over seeds. p (Holm) is corrected over {what} and all tasks of this table."
        if plan.equivalence is not None:
            yield (
                f"p (equal within {plan.equivalence:g}) is of two one-sided tests: if it is small, the true difference "
                f"is less than {plan.equivalence:g} either way, which the study file calls equal in practice."
            )
    elif "P(improvement)" in table.header:
        yield (
            "The mean difference to the baseline is over tasks, with a bootstrap over tasks and seeds; with few tasks "
            "its interval is too narrow. P(improvement) is the probability that a run of the method scores higher than "
            "a run of the baseline on the same task (Agarwal et al., 2021). Ranks are over methods, 1 the best, for "
            "each task and seed."
        )


def _write_csv(plan: Plan, groups: Groups) -> None:
    """Write one line per score, which tools for comparing classifiers can pivot."""
    rows = []
    for task, methods in groups.items():
        for name, group in methods.items():
            for run in group.runs:
                line = {"task": task, "method": name, "seed": run.seed}
                rows.append({**line, "scored_on": "dev", "metric": group.metric, "score": run.score})
                for scoring in plan.score_on.get(task, ()):
                    for metric, value in (score_on(run, scoring) or {}).items():
                        rows.append({**line, "scored_on": scoring.name, "metric": metric, "score": value})
    with replaced_file(plan.folder / "results.csv") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
