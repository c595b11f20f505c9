"""What a report says of runs that have not finished."""

from __future__ import annotations

from collections.abc import Iterator

from attnreg.experiments.compare.document import Paragraph
from attnreg.experiments.compare.planned import finished
from attnreg.experiments.compare.study import Study


def incomplete(study: Study) -> Iterator[Paragraph]:
    """Say which runs are missing, why, and how to go on; nothing for a complete comparison."""
    runs = study.runs()
    unknown = [method.name for method in study.methods if study.chosen(method) is None]
    if finished(runs) and not unknown:
        return
    done = sum(run.finished for run in runs)
    yield Paragraph(
        f"Incomplete: {done} of {len(runs)} runs have finished. Differences use the seeds that both methods have. "
        "Repeat the command to go on."
    )
    for method in study.methods:
        chosen = study.chosen(method)
        if chosen is None:
            yield Paragraph(f"{method.name}: no score yet, because its search has not finished.")
        elif missing := [str(run.seed) for run in study.final_runs(chosen) if not run.finished]:
            yield Paragraph(
                f"{method.name}: {study.seeds - len(missing)} of {study.seeds} seeds; missing: {', '.join(missing)}."
            )
    for run in runs:
        if (reason := run.failure) is not None:
            yield Paragraph(f"Failed: {run.method.name}, {run.role}, seed {run.seed}: {reason} (see {run.log})")
