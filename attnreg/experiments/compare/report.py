"""The report of a comparison: ``report.md``, ``report.html``, ``results.csv``, ``plots/``."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator, Sequence

from attnreg._files import replaced_file
from attnreg.experiments.compare import tables
from attnreg.experiments.compare.document import (
    Block,
    Code,
    Heading,
    Paragraph,
    Picture,
    Table,
    markdown,
    self_contained_html,
)
from attnreg.experiments.compare.group import Group, check_rows
from attnreg.experiments.compare.study import Study
from attnreg.experiments.plots.seeds import plot_seeds


def write_report(study: Study) -> list[Table]:
    """Write the report of a finished comparison.

    Args:
        study: all of its runs are finished.

    Returns:
        the tables of scores and of differences, for the screen.
    """
    groups = [
        Group(method.text, study.final_runs(chosen))
        for method in study.methods
        if (chosen := study.chosen(method)) is not None
    ]
    baseline = next(group for group in groups if group.name == study.baseline.text)
    others = [group for group in groups if group is not baseline]
    longer = study.equal_time_methods()
    plain = {method.text: Group(more.text, study.equal_time_runs(more)) for method, more in longer.items()}
    if baseline.counts_rows:
        check_rows([baseline, *others, *plain.values()])
    _write_csv(study)
    shown = [tables.scores(groups)] + ([tables.differences(others, baseline)] if others else [])
    blocks: list[Block] = [
        Heading(
            f"{', '.join(group.name for group in groups)} on {_config(baseline, 'task')}: {baseline.metric} on dev"
        ),
        Code([_command(study)]),
        *(Paragraph(text) for text in _setting(groups, baseline)),
        Paragraph(_made(study)),
        Heading("Scores"),
        shown[0],
        *_pictures(study, [*groups, *plain.values()], baseline),
    ]
    if others:
        text = (
            "Seed by seed, the method minus the baseline. Over seeds: Student's paired t, which answers for other "
            f"seeds on the same dev rows. {_over_rows(baseline)} The intervals are not corrected for the number of "
            "methods; p (Holm) is, within this table."
        )
        blocks += [Heading(f"Differences to {baseline.name}"), shown[1], Paragraph(text)]
    text = (
        f"Train is the score on {baseline.results[0]['train_rows_scored']} of the rows that were trained on. "
        + ("The calibration error is the expected one over 15 bins of confidence, on dev."
           if baseline.has("dev", "calibration_error")
           else "There is no calibration error: the answers are no classes of whole rows.")
    )  # fmt: skip
    blocks += [Heading("Fit"), tables.fit(groups), Paragraph(text)]
    text = (
        "Means over seeds; ratios are to the baseline. Time is that of training, without evaluations, checkpoints and "
        "searches. Passes are rows of the fine-tuned networks; what a Generator computes is in the time alone. Memory "
        "is the peak of the process on a CPU, of tensors on a GPU. The drop rate is over active steps and the "
        "layers in which anything was dropped; how many these are stands before it."
    )
    blocks += [Heading("Cost"), tables.cost(groups, baseline), Paragraph(text)]
    if plain:
        text = (
            "The same model, data and seeds, with more epochs: as many as take as long to train, by the times of the "
            "runs that were first there. The time ratio is its time over the method's: 1 if they came out the same. "
            "p (Holm) is corrected within this table."
        )
        equal = tables.equal_time([group for group in others if group.name in plain], plain)
        blocks += [Heading(f"{baseline.name}, given the same time"), equal, Paragraph(text)]
    blocks += [Heading("Options"), tables.options(study, groups), *_tries(study, groups)]
    for name, content in (("report.md", markdown(blocks, study.folder)), ("report.html", self_contained_html(blocks))):
        with replaced_file(study.folder / name) as file:
            file.write(content)
    return shown


def _config(group: Group, name: str) -> object:
    return group.results[0]["config"][name]


def _command(study: Study) -> str:
    words = ["attnreg", "compare", *(method.text for method in study.methods), *study.options]
    words += ["--seeds", str(study.seeds), "--baseline", study.baseline.text, "--output-dir", str(study.folder)]
    if any(study.search_runs(method) for method in study.methods):
        words += ["--search-seeds", str(study.search_seeds), "--search-rows", str(study.search_rows)]
    switches = {"--keep-models": study.keep_models, "--no-equal-time": not study.equal_time}
    return shlex.join([*words, *(switch for switch, on in switches.items() if on)])


def _over_rows(baseline: Group) -> str:
    if baseline.counts_rows:
        return (
            "Over dev rows: a percentile bootstrap with 2000 resamples, which answers for other dev rows with the same "
            "networks. p is of the first."
        )
    return (
        f"There is no interval over dev rows: {baseline.metric} of this task is not made of counts of rows. What other "
        "dev rows would change is not in the interval over seeds."
    )


def _setting(groups: Sequence[Group], baseline: Group) -> Iterator[str]:
    shown = {
        "epochs": f"{_config(baseline, 'epochs')} epochs",
        **{
            name: f"{name.replace('_', ' ')} {_config(baseline, name) or 'of the task'}"
            for name in ("model", "batch_size", "learning_rate", "max_length")
        },
        "mixed_precision": _config(baseline, "mixed_precision") or "float32",
    }
    different = tables.not_common(groups)
    common = "; ".join(str(text) for name, text in shown.items() if name not in different)
    yield (
        f"{len(baseline.runs)} seeds; {baseline.results[0]['rows']} training rows, {baseline.size} dev rows; {common}. "
        "The score is that of the last epoch, for the network that the method returns."
    )
    if different:
        yield f"Not the same for all: {', '.join(name.replace('_', ' ') for name in different)}; see the options below."
    for group in groups:
        if group.results[0]["config"]["own"].get("reward_data") == "dev":
            yield f"Warning: {group.name} took its rewards from the dev rows, so its scores are not held out."
        if held := group.results[0]["held_out"]:
            yield (
                f"{group.name} held out {held['rows']} of the training rows for its reward in the first "
                f"{held['epochs']} epochs, so it saw fewer, in another order."
            )


def _made(study: Study) -> str:
    environments = {tuple(run.result["environment"].items()) for run in study.runs()}
    described = ("; ".join(" ".join(map(str, pair)) for pair in environment) for environment in sorted(environments))
    return f"{'Made with' if len(environments) == 1 else 'Warning, made differently:'} {' | '.join(described)}."


def _pictures(study: Study, groups: Sequence[Group], baseline: Group) -> Iterator[Picture]:
    path = study.folder / "plots" / "seeds.png"
    plot_seeds({group.name: group.scores for group in groups}, baseline.metric, path)
    yield Picture(
        path, "Points: seeds, at the same height in each line. Bar: mean and its 95 % interval by Student's t."
    )


def _tries(study: Study, groups: Sequence[Group]) -> list[Block]:
    counts = {method.text: len(method.variants) for method in study.methods}
    if max(counts.values()) == 1:
        return [Paragraph("Nothing was searched: each method was given one set of options.")]
    blocks: list[Block] = []
    if len(set(counts.values())) > 1:
        tried = ", ".join(f"{name} {count}" for name, count in counts.items())
        blocks.append(Paragraph(f"The methods were not given the same number of tries: {tried}."))
    if (searched := tables.tries(study)) is not None:
        text = (
            f"Values in braces were chosen by the mean score on {study.search_rows} rows held out from train, with "
            f"{study.search_seeds} seed{'s' * (study.search_seeds > 1)} of their own; dev took no part."
        )
        blocks += [Paragraph(text), searched]
    return blocks


def _write_csv(study: Study) -> None:
    """One line per run, searched ones too."""
    rows = []
    for run in study.runs():
        result = run.result
        rows.append(
            {
                "method": run.method.text,
                "role": run.role,
                "seed": run.seed,
                "scored_on": result["scored_on"],
                "metric": result["metric"],
                "score": run.score,
                **{f"dev_{name}": value for name, value in result["dev"].items()},
                **{f"train_{name}": value for name, value in result["train"].items()},
                "best_epoch": result["best_epoch"]["epoch"],
                "best_epoch_score": result["best_epoch"][result["metric"]],
                **{name: result["config"][name] for name in ("epochs", "batch_size", "learning_rate", "train_size")},
                **{name: value for name, value in result.items() if isinstance(value, (int, float))},
                "folder": run.folder.relative_to(study.folder).as_posix(),
            }
        )
    with replaced_file(study.folder / "results.csv") as file:
        names = dict.fromkeys(name for row in rows for name in row)  # a search scores on less than the rest
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
