"""The report of a study over several comparisons: the primary contrast, means over tasks, further data, files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

import numpy as np

from attnreg.experiments.compare.contrast import ONE_SEED, Contrast, contrasts, seeds_detect, warnings_of
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.report import figures
from attnreg.experiments.compare.scoring import Scoring
from attnreg.experiments.compare.statistics import mean_over_tasks
from attnreg.experiments.compare.study import Study
from attnreg.experiments.results import document
from attnreg.experiments.results.document import Block, Contents, Heading, Paragraph, Picture, Table
from attnreg.experiments.tasks.metrics import METRICS

Groups = Mapping[str, Mapping[str, Group]]  # by comparison and method
Declared = Mapping[tuple[tuple[str, str], str], Contrast]  # by methods (the second is subtracted) and task
_TESTS = "Student's paired t-test over seeds. p (Holm) is corrected over all rows of this table."
_OVER_TASKS = (
    "The mean difference to the baseline is over tasks, with a bootstrap over tasks and seeds; with few tasks its "
    "interval is too narrow. Of a score up to 100, it is the hundredth part."
)
_RUNGS = (
    "The best rung is the baseline with the highest score on held-out rows of train, in its search. Times of "
    "training are with the values that the searches chose."
)


def write_study_report(study: Study) -> list[Table]:
    """Write the report of a study and ``results.csv``; return the tables to show."""
    finished_of = {name: comparison.groups().values() for name, comparison in study.comparisons.items()}
    groups = {name: {group.name: group for group in finished} for name, finished in finished_of.items() if finished}
    if not groups:
        return []
    missing = [f"{name}: {text}" for name, comparison in study.comparisons.items() for text in comparison.missing()]
    reported = groups if study.report_on is None else _scored_on(study, groups, study.report_on)
    if not reported:
        missing.append(f"No run has a score on {study.report_on} yet: repeat the command.")
    declared = _declared(study, reported)
    warnings = [f"{task}: {text}" for task, methods in groups.items() for text in warnings_of([*methods.values()])]
    opening = [*warnings, *_verdict(declared), *study.notes, *missing]
    blocks: list[Block] = [Heading(f"Study {study.folder.name}"), *map(Paragraph, opening), Contents()]
    tables: list[Table] = []
    suffix = f" on {study.report_on}" if study.report_on else ""
    for title, pictures, table, texts in (
        (f"Scores{suffix}: means over seeds", (), _scores(study, reported), ()),
        ("Differences by task", _pictures(study, declared), _differences(declared), [_TESTS]),
        ("Against the best rung", (), _against_best_rung(study, reported), [_RUNGS]),
        ("Over tasks", (), _across(study, reported), [_OVER_TASKS]),
        ("Scores on further data: means over seeds", (), _further(study, groups), ()),
        ("Published figures", (), _published(study, groups), ()),
    ):
        if table.header:
            blocks += [Heading(title), *pictures, table, *map(Paragraph, texts)]
            tables.append(table)
    if study.published is not None:
        blocks += [Heading("The paper"), Paragraph(str(study.published))]
    folders = {name: study.comparisons[name].folder.relative_to(study.folder).as_posix() for name in groups}
    links = "\n".join(f"- [{name}]({quote(folder)}/report.md)" for name, folder in folders.items())
    blocks += [Heading("Each comparison"), Paragraph(links)]
    study.folder.mkdir(parents=True, exist_ok=True)
    document.save(blocks, study.folder)
    document.save_rows(list(_csv_rows(study, groups)), study.folder / "results.csv")
    return tables


def _scored_on(study: Study, groups: Groups, name: str) -> Groups:
    """Return the groups with their scores on further data, without the runs that have no such score."""
    scored: dict[str, dict[str, Group]] = {}
    for task, methods in groups.items():
        scoring = next(scoring for scoring in study.score_on[task] if scoring.name == name)
        for method, group in methods.items():
            if scores := _measured(group, scoring, group.metric):
                scored.setdefault(task, {})[method] = replace(group.on(scores), further=scores)
    return scored


def _declared(study: Study, groups: Groups) -> Declared:
    """Return the declared contrasts on all tasks: the primary one, or else every method against the baseline."""
    baseline = study.first.baseline.name
    others = [(method.name, baseline) for method in study.first.methods if method.name != baseline]
    pairs = others if study.primary is None else [study.primary]
    labels = [(pair, task) for pair in pairs for task, methods in groups.items() if {*pair} <= methods.keys()]
    return contrasts({(pair, task): (groups[task][pair[0]], groups[task][pair[1]]) for pair, task in labels})


def _scores(study: Study, groups: Groups) -> Table:
    rows = []
    for task, methods in groups.items():
        first = next(iter(methods.values()))
        names = [method.name for method in study.first.methods]
        means = {name: _mean(methods[name].scores) if name in methods else "not run" for name in names}
        trivial = "none" if first.trivial is None or study.report_on else _mean(first.trivial[1])
        rows.append({"task": task, "metric": first.metric.replace("_", " "), **means, "trivial": trivial})
    return Table.of(rows, texts=(0, 1))


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.4f}"


def _verdict(declared: Declared) -> Iterator[str]:
    """Say in one sentence which of the declared differences hold."""
    hold = {label: contrast for label, contrast in declared.items() if contrast.holds}
    if declared and max(len(contrast.gaps) for contrast in declared.values()) < 2:
        yield ONE_SEED
    elif hold:
        names = [
            f"{' - '.join(pair)} on {task} ({contrast.difference.mean:+.4f})" for (pair, task), contrast in hold.items()
        ]
        yield f"Of {len(declared)} differences, {len(hold)} hold after correction: {'; '.join(names)}."
    elif tested := [contrast for contrast in declared.values() if not (contrast.is_alike or contrast.mine.never_acted)]:
        none = f"Not significant: none of {len(tested)} differences holds after one correction over all of them"
        yield f"{none} {seeds_detect(tested, corrected=len(tested) == 1)}"
    for (pair, task), contrast in declared.items():
        if contrast.is_alike:
            yield f"{' - '.join(pair)} on {task} is {contrast.difference.mean:+.4f} with every seed, without a test."


def _differences(declared: Declared) -> Table:
    """The declared differences by task, with one correction over all of them."""
    pairs = [{"difference of": " - ".join(pair), "task": task} for pair, task in declared]
    rows = [row | contrast.cells for row, contrast in zip(pairs, declared.values(), strict=True)]
    return Table.of(rows, texts=(0, 1))


def _against_best_rung(study: Study, groups: Groups) -> Table:
    """Every method that is no rung, minus the best rung of the task, with one correction over all rows."""
    best = {task: study.comparisons[task].best_of(study.rungs) if study.rungs else None for task in groups}
    rungs = {task: groups[task][name] for task, name in best.items() if name is not None and name in groups[task]}
    others = [(task, group) for task in rungs for group in groups[task].values() if group.name not in study.rungs]
    compared = contrasts({(task, other.name): (other, rungs[task]) for task, other in others})
    rows = []
    for (task, name), contrast in compared.items():
        time = f"{groups[task][name].training_time / rungs[task].training_time:.2f}"
        row = {"task": task, "method": name, "best rung": contrast.other.name, "time / rung's": time}
        rows.append(row | contrast.cells)
    return Table.of(rows, texts=(0, 1, 2))


def _across(study: Study, groups: Groups) -> Table:
    """Mean differences to the baseline over tasks, of the methods that ran on all tasks, if there are several."""
    baseline, rows = study.first.baseline.name, []
    for name in (method.name for method in study.first.methods if method.name != baseline):
        shared = {task: methods for task, methods in groups.items() if {name, baseline} <= methods.keys()}
        compared = contrasts({task: (methods[name], methods[baseline]) for task, methods in shared.items()})
        if len(compared) == len(groups) > 1:
            gaps = [[gap / _highest(contrast.mine) for gap in contrast.gaps] for contrast in compared.values()]
            mean, low, high = mean_over_tasks(gaps)
            interval = {"95 % over tasks and seeds": f"[{low:+.4f}, {high:+.4f}]"}
            rows.append({"method": name, "mean difference": f"{mean:+.4f}", **interval})
    return Table.of(rows)


def _highest(group: Group) -> float:
    return METRICS[group.metric].highest if group.metric in METRICS else 1.0


def _measured(group: Group, scoring: Scoring | None, metric: str) -> dict[int, float]:
    """Return the scores, by seed, of the runs that are scored on further data, or on dev without any."""
    scores = {run.seed: run.result["dev"] if scoring is None else scoring.of(run) for run in group.runs}
    return {seed: float(score[metric]) for seed, score in scores.items() if score is not None and metric in score}


def _further(study: Study, groups: Groups) -> Table:
    rows = []
    for task, methods in groups.items():
        for scoring in study.score_on.get(task, ()):
            for name, group in methods.items():
                scores = [*_measured(group, scoring, group.metric).values()]
                row = {"task": task, "scored on": scoring.name, "method": name}
                row["mean"] = _mean(scores) if scores else "not scored"
                row["seeds"] = f"{len(scores)} of {len(group.runs)}"
                rows.append(row | {"on dev": _mean(group.scores)})
    return Table.of(rows, texts=(0, 1, 2))


def _published(study: Study, groups: Groups) -> Table:
    """The figures of a paper beside the measured means, as percentages where the paper has them so."""
    rows = []
    for task, methods in groups.items() if study.published is not None else ():
        scorings = {"dev": None, **{scoring.name: scoring for scoring in study.score_on.get(task, ())}}
        for method, figures_by_data in study.figures.get(task, {}).items():
            for data, figure in figures_by_data.items():
                mean, values = "not run", list[float]()
                if (group := methods.get(method)) is not None:
                    if data in scorings:
                        metric = study.metrics.get(task, group.metric)
                        values = [*_measured(group, scorings[data], metric).values()]
                    scale = 100 / _highest(group)
                    mean = f"{np.mean([scale * value for value in values]):.1f}" if values else "not scored"
                row = {"task": task, "method": method, "data": data, "published": f"{figure:.1f}"}
                rows.append({**row, "measured": mean, "seeds": str(len(values))})
    return Table.of(rows, texts=(0, 1, 2))


def _pictures(study: Study, declared: Declared) -> Iterator[Picture]:
    for number, pair in enumerate(dict.fromkeys(pair for pair, _ in declared), 1):
        of_pair = {task: contrast for (names, task), contrast in declared.items() if names == pair}
        path = study.folder / "plots" / f"difference-{number}.png"
        yield figures.forest(of_pair, path, f"{pair[0]} minus {pair[1]} by task, with 95 % intervals over seeds.")


def _csv_rows(study: Study, groups: Groups) -> Iterator[dict[str, object]]:
    """Yield one row per score, which tools for comparing classifiers can pivot."""
    for task, methods in groups.items():
        for name, group in methods.items():
            for run in group.runs:
                row, environment = {"task": task, "method": name, "seed": run.seed}, run.result["environment"]
                yield {**row, "scored_on": group.where, "metric": group.metric, "score": run.score, **environment}
                for scoring in study.score_on.get(task, ()):
                    for metric, value in (scoring.of(run) or {}).items():
                        yield {**row, "scored_on": scoring.name, "metric": metric, "score": value, **environment}
