"""The report of a comparison: ``report.md``, ``report.html``, ``results.csv``, ``plots/``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnreg.errors import counted
from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.contrast import Contrast, contrasts, verdict, warnings_of
from attnreg.experiments.compare.group import Group, check_rows
from attnreg.experiments.compare.method import typed_words
from attnreg.experiments.compare.report import figures, tables
from attnreg.experiments.options.settings import task_of
from attnreg.experiments.results import document
from attnreg.experiments.results.document import Block, Code, Contents, Heading, Paragraph, Table
from attnreg.experiments.results.outcome import rounds_played
from attnreg.experiments.tasks.kinds import kind_class

_COST = (
    "Values are means over seeds; ratios are relative to {}. Time is training time, without evaluation, "
    "checkpoints and searches; on a CPU it is CPU time, which other work on the machine hardly changes. Memory is the "
    "peak of the process on a CPU, and of tensors on a GPU. The drop rate is the mean over active steps and over the "
    "layers in the column before it; a method without an attention regularizer has none."
)

_DIFFERENCES = (
    "A difference is the method's score minus the baseline's, paired by seed. The interval over seeds and p come from "
    "Student's paired t-test: they show what other seeds would change {}. p (Holm) is corrected for the number of "
    "methods in this table; intervals are not. Detectable is the true difference that a test over these seeds would "
    "find with a probability of 0.8, as far as these differences vary."
)
_FIT = (
    "Train is the score on {} of the training {}. The calibration error is the expected calibration error on {} "
    "rows, with 15 bins."
)


def write_report(comparison: Comparison) -> list[str | Table]:
    """Write the report of the finished runs, if there are any; return the texts and tables for the screen."""
    by_method = comparison.groups()
    if not by_method:
        return []
    groups = list(by_method.values())
    baseline = by_method.get(comparison.baseline, groups[0])
    others = [group for group in groups if group is not baseline and comparison.baseline in by_method]
    compared = list(contrasts({group.name: (group, baseline) for group in others}).values())
    planned = {
        method.name: Group.of(variant.name, comparison.final_runs(variant, "equal time"))
        for method, variant in comparison.equal_time_methods().items()
    }
    longer = {name: group for name, group in planned.items() if group.runs}
    same_time = {group.name: (group, longer[group.name]) for group in others if group.name in longer}
    equal = list(contrasts(same_time).values())
    if baseline.has_classes:
        check_rows([*groups, *longer.values()])
    _write_csv(comparison)
    folder, opening = comparison.folder / "plots", [*warnings_of(groups)]
    if len(groups) > 1 or len(comparison.methods) == 1:
        opening += verdict(groups, compared, equal)
    scores, names = tables.scores(groups, baseline), ", ".join(group.name for group in groups)
    difference_tables = [tables.differences(compared)] if compared else []
    rate_pictures = figures.drop_rates(groups, folder)
    blocks: list[Block] = [
        Heading(f"{names} on {baseline.config('task')}: {baseline.metric.replace('_', ' ')} on {baseline.where} rows"),
        *map(Paragraph, (*opening, *comparison.missing())),
        Code(_command(comparison)),
        *map(Paragraph, _setting(comparison, groups, baseline)),
        Contents(),
        *(block for table in difference_tables for block in _differences(table, compared, baseline, folder)),
        Heading("Scores"),
        scores,
        figures.seeds([*groups, *longer.values()], baseline, folder),
        Heading("Learning curves"),
        figures.learning(groups, folder),
        *([Heading("Drop rates"), *rate_pictures] if rate_pictures else ()),
        Heading("Fit"),
        tables.fit(groups),
        Paragraph(_FIT.format(_range(groups, "train_rows_scored"), _trained_on(baseline), baseline.where)),
        Heading("Cost"),
        tables.cost(groups, baseline),
        Paragraph(_COST.format(baseline.name)),
        *(_same_time(baseline, equal) if longer else ()),
        Heading("Options"),
        tables.options(comparison, groups),
        *_tries(comparison, groups),
    ]
    document.save(blocks, comparison.folder)
    # A terminal is too narrow for the column of detectable differences.
    narrow = [Table(table.header[:-1], [row[:-1] for row in table.rows], table.texts) for table in difference_tables]
    return [*opening, scores, *narrow]


def _differences(table: Table, compared: Sequence[Contrast], baseline: Group, folder: Path) -> Iterator[Block]:
    yield Heading(f"Differences to {baseline.name}")
    yield figures.forest(
        {contrast.mine.name: contrast for contrast in compared},
        folder / "differences.png",
        f"Mean difference to {baseline.name}, paired by seed, with its 95 % interval over seeds (Student's t). Filled: "
        "the interval does not include 0.",
    )
    yield table
    rows = "on the same dev rows"
    if baseline.seed_rows is not None:
        rows = "with their rows; seeds of --folds share training rows, so p may be too low and intervals too narrow"
    yield Paragraph(_DIFFERENCES.format(rows))


def _same_time(baseline: Group, compared: Sequence[Contrast]) -> Iterator[Block]:
    yield Heading(f"Differences to {baseline.name} with the same training time")
    yield tables.equal_time(compared)
    yield Paragraph(
        "The baseline is trained for more epochs, with the same model, data and seeds, so that its training takes as "
        "long as the method's. The measured times of the first runs set the number of epochs. The time ratio is the "
        "baseline's time over the method's. p (Holm) is corrected within this table."
    )


def _command(comparison: Comparison) -> str:
    searched = any(comparison.search_runs(method) for method in comparison.methods)
    design: dict[str, object] = {"seeds": comparison.seeds, "first_seed": comparison.first_seed or None}
    design |= {"baseline": comparison.baseline.name, "output_dir": comparison.folder}
    design |= {"search_seeds": comparison.search_seeds, "search_rows": comparison.search_rows} if searched else {}
    design |= {"keep_models": comparison.keep_models, "no_equal_time": not comparison.equal_time}
    methods = [method.typed for method in comparison.methods]
    options = {**comparison.options, **design}
    held_out = options.pop("validation_rows", None)
    command = shlex.join(["attnreg", "compare", *methods, *typed_words(options)])
    return command if held_out is None else f"{command}  # in a study file, with `validation_rows: {held_out}`"


def _setting(comparison: Comparison, groups: Sequence[Group], baseline: Group) -> Iterator[str]:
    """Say which settings the methods share, in which they differ, and in which environment they ran."""
    differing = tables.not_common(groups)
    texts = {"epochs": counted(baseline.config("epochs"), "epoch")}
    for name in ("model", "batch_size", "learning_rate", "max_length"):
        texts[name] = f"{name.replace('_', ' ')} {baseline.config(name) or 'of the task'}"
    texts["mixed_precision"] = baseline.config("mixed_precision") or "float32"
    common = "; ".join(str(text) for name, text in texts.items() if name not in differing)
    at_the_end = all(group.config("stop_on") is None for group in groups)
    scored_rows = "dev" if baseline.seed_rows is None else f"{baseline.seed_rows}, instead of dev,"
    when = "after the last epoch" if at_the_end else "at the end of training"
    scores = f"Each method is scored on {scored_rows} {when}, with the network that it returns."
    rows = (
        f"{_range(groups, 'rows')} training {_trained_on(baseline)}, {len(baseline.records[0])} {baseline.where} rows"
    )
    yield f"{counted(len(baseline.runs), 'seed')}; {rows}; {common}. {scores}"
    if differing:
        names = ", ".join(name.replace("_", " ") for name in differing)
        yield f"The methods differ in {names}: see the options below."
    for group in groups:
        if group.config("own").get("reward_data") in ("dev", "half-dev"):
            yield f"Warning: {group.name} took its rewards from the dev rows, so its dev scores are biased."
        events = sum((Counter(result.get("events", {})) for result in group.results), Counter[str]())
        if played := rounds_played(events, len(group.results)):
            yield f"{group.name}: {played}"
        if group.config("stop_on") is not None:
            yield from _stopped(group)
        if held_out := group.first["held_out"]:
            epochs = "first epoch" if held_out["epochs"] == 1 else f"first {held_out['epochs']} epochs"
            yield (
                f"In its {epochs}, {group.name} held out {counted(held_out['rows'], 'training row')} for its reward, "
                "so it trained on fewer rows, in another order."
            )
    environments = {tuple(run.result["environment"].items()) for run in comparison.runs() if run.finished}
    described = ("; ".join(" ".join(map(str, pair)) for pair in environment) for environment in sorted(environments))
    label = "Environment" if len(environments) == 1 else "Warning: the environments of the runs differ"
    yield f"{label}: {' | '.join(described)}."


def _stopped(group: Group) -> Iterator[str]:
    """Say when the runs of a method with ``--patience`` or ``--select best`` stopped, and which rows decided."""
    on_dev = group.config("stop_on") == "dev"
    rows = "the dev rows" if on_dev else f"{counted(group.first['stopping']['rows'], 'row')} held out of train"
    last, returned = (f"{group.mean('stopping', f'{name}_epoch'):.1f}" for name in ("last", "returned"))
    yield (
        f"By the score on {rows}, {group.name} trained until epoch {last} of {group.config('epochs')} and returned the "
        f"network of epoch {returned}, on average."
    )
    if on_dev and group.config("select") == "best":
        yield f"Warning: {group.name} chose its epoch by the dev scores, so they are biased upward."


def _tries(comparison: Comparison, groups: Sequence[Group]) -> Iterator[Block]:
    counts = {method.name: method.tries for method in comparison.methods}
    if len(set(counts.values())) > 1:
        tried = ", ".join(f"{name} ({count})" for name, count in counts.items())
        yield Paragraph(f"The methods did not have the same number of tries: {tried}.")
    bias = "Dev was not used."
    if groups[0].seed_rows is not None:
        bias = "The scored rows are of train: some may have taken part in this choice, which would bias scores upward."
    for method in comparison.methods:
        if (winner := method.winner) is not None:
            yield Paragraph(
                f"{method.name} is the winner of the search in {method.folder}: {counted(winner.trials, 'trial')} in "
                f"{counted(winner.runs, 'run')} on {winner.task}, scored on {winner.rows} rows held out from train. "
                f"{bias}"
            )
    if (table := tables.tries(comparison)) is not None:
        yield Paragraph(
            f"Values in braces were selected by the mean score on {comparison.search_rows} rows held out from train, "
            f"over {counted(comparison.search_seeds, 'separate seed')}. {bias}"
        )
        yield table


def _range(groups: Sequence[Group], name: str) -> str:
    """Return a count, which may differ between methods, from the least to the most."""
    counts = [int(group.first[name]) for group in groups]
    return f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else str(counts[0])


def _trained_on(group: Group) -> str:
    """Return what batches consist of: rows or, if these may be long, windows of them."""
    return "windows" if kind_class(task_of(group.first["config"]).kind).has_windows else "rows"


def _write_csv(comparison: Comparison) -> None:
    """Write one line per run, including search runs."""
    rows = []
    for run in (run for run in comparison.runs() if run.finished):
        result = run.result
        row = {"method": run.method.name, "role": run.role, "seed": run.seed, "scored_on": result["scored_on"]}
        row |= {"metric": result["metric"], "score": run.score}
        for part in ("dev", "train", "stopping"):
            row |= {f"{part}_{name}": value for name, value in (result.get(part) or {}).items()}
        best = result["best_epoch"]
        row |= {"best_epoch": best["epoch"], "best_epoch_score": best[result["metric"]]}
        row |= {name: result["config"][name] for name in ("epochs", "batch_size", "learning_rate", "train_size")}
        row |= {name: value for name, value in result.items() if isinstance(value, (int, float))}
        row |= result["environment"]  # the commit, CPU, torch and so on
        rows.append(row | {"folder": run.folder.relative_to(comparison.folder).as_posix()})
    document.save_rows(rows, comparison.folder / "results.csv")  # search runs have fewer metrics
