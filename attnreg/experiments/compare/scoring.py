"""Score the networks of finished runs on further data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnreg.errors import AttnRegWarning, InputError
from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.tasks.built_in import get_task


@dataclass(frozen=True)
class Scoring:
    """Further data to score finished networks on.

    ``name`` is for files and tables; ``None`` stands for the comparison's option; ``classes`` maps classes of the data
    to classes of the model, where names differ.
    """

    name: str
    task: str | None = None
    data_dir: str | None = None
    split: str = "validation"
    classes: Mapping[str, str] = field(default_factory=dict)
    max_length: int | None = None

    @staticmethod
    def usual_name(entry: Mapping[str, Any]) -> str:
        """Return the name of an entry in a study file: ``name``, or else its data folder, task or split."""
        folder = Path(entry["data_dir"]).name if "data_dir" in entry else None
        return str(entry.get("name", folder or entry.get("task", entry.get("split", "validation"))))

    @property
    def file(self) -> str:
        """The name of the file with the scores, without suffix."""
        return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in self.name)

    def check(self, comparison: Comparison) -> None:
        """Read the data, unless all runs are scored on them, so that mistakes are reported before any run starts."""
        from attnreg.experiments.setup.rows import read_data  # late, as all these: they are slow to import
        from attnreg.experiments.tasks.kinds import kind_class
        from attnreg.experiments.tasks.kinds.kind import reading_of
        from attnreg.experiments.tasks.loading.data import load_to_score, named_sources
        from attnreg.experiments.tasks.loading.files import WHOLE

        runs = [run for run in comparison.runs() if run.role == "final"]
        if runs and all(self.of(run) is not None for run in runs):
            return
        settings = comparison.final_runs(comparison.baseline.variants[0])[0].settings
        of_run, place = settings.chosen_task(), f"score_on: {self.name}"
        task = of_run if self.task in (None, of_run.name) else get_task(str(self.task))
        if task.kind != of_run.kind:
            raise InputError(f"Expected a {of_run.kind} task in {place}, got {task.name!r} ({task.kind}).")
        folder = settings.data_dir if self.data_dir is None and task.name == of_run.name else self.data_dir
        if self.data_dir is None and folder is not None and WHOLE in named_sources(of_run, folder)[2].values():
            raise InputError(f"Expected `data_dir` with other rows in {place}: {folder} is what runs are trained on.")
        classes = read_data(settings).task.labels if kind_class(of_run.kind).has_classes else ()
        wanted = replace(task, labels=task.labels or classes, numbered=bool(task.labels) or self.data_dir is None)
        try:
            scored, *_ = load_to_score(wanted, folder, self.split, self.classes)
            if classes != scored.labels:
                reading_of(classes, scored)
        except InputError as error:
            raise InputError(f"In {place}: {error}") from error

    def of(self, run: PlannedRun) -> dict[str, Any] | None:
        """Return the metrics of a run on these data; ``None`` until it is scored on them."""
        from attnreg.experiments.results.saved_model import request  # late: it imports torch

        path = run.folder / "evaluations" / f"{self.file}.json"
        names = ("data_dir", "split", "max_length", "classes")
        wanted = request({"task": self.task}, **{name: getattr(self, name) for name in names})
        try:
            if not path.is_file():
                return None
            content = json.loads(path.read_text(encoding="utf-8"))
            is_same = "request" in content and content["request"].items() <= wanted.items()  # older files say less
            return dict(content["metrics"]) if is_same else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"Cannot read the evaluation {path}: {error!r}.") from error

    def score(self, run: PlannedRun, device: str | None) -> str | None:
        """Score a run; return the reason if that failed."""
        from attnreg.experiments.results.saved_model import SavedModel  # late: it imports torch

        try:
            saved = SavedModel(run.folder, {"task": self.task}, self.data_dir, self.max_length, device=device)
            saved.score(self.split, self.file, self.classes)
        except InputError as error:
            return f"{run.method.name}, seed {run.seed}, on {self.name}: {error}"
        return None


def score_further(comparison: Comparison, scorings: Sequence[Scoring]) -> list[str]:
    """Score the finished runs of a comparison that are not scored yet; return a sentence if some cannot be scored.

    After a first signal to stop, the scores of the current run are still written.
    """
    from attnreg.experiments.runs.stopping import interruptible  # late: it imports torch

    runs = [run for group in comparison.groups().values() for run in group.runs] if scorings else []
    missing = [(run, scoring) for run in runs for scoring in scorings if scoring.of(run) is None]
    with warnings.catch_warnings():
        warnings.simplefilter("once", AttnRegWarning)  # once per data, not per run
        with interruptible() as stopped:
            reasons = [scoring.score(run, comparison.options.get("device")) for run, scoring in missing if not stopped]
    if stopped:
        raise KeyboardInterrupt
    failures = [reason for reason in reasons if reason is not None]
    return [f"{len(failures)} scores are missing. The first: {failures[0]}"] if len(failures) > 1 else failures
