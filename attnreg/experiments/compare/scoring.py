"""Score the networks of finished runs on further data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnreg.errors import AttnRegWarning, InputError
from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.planned import PlannedRun


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
