"""Score the networks of finished runs on further data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

from attnreg.errors import AttnRegWarning, InputError
from attnreg.experiments.compare.plan import Scoring
from attnreg.experiments.compare.planned import PlannedRun, finished_of
from attnreg.experiments.compare.study import Study


def score_further(study: Study, scorings: Sequence[Scoring], device: str | None = None) -> list[str]:
    """Score the finished runs of a comparison that are not scored yet; return one sentence for each that fails.

    Args:
        study: the comparison.
        scorings: what to score on.
        device: device (default: the best available).
    """
    runs = _final(study) if scorings else []
    missing = [(run, scoring) for run in runs for scoring in scorings if score_on(run, scoring) is None]
    with warnings.catch_warnings():
        warnings.simplefilter("once", AttnRegWarning)  # of each data, not of each run
        failures = [_score(run, scoring, device) for run, scoring in missing]
    return [failure for failure in failures if failure is not None]


def _score(run: PlannedRun, scoring: Scoring, device: str | None) -> str | None:
    """Score a run; return why it failed, if so."""
    from attnreg.experiments.results.saved_model import score_saved  # late: it imports torch

    try:
        score_saved(
            run.folder,
            {"task": scoring.task},
            data_dir=scoring.data_dir,
            split=scoring.split,
            max_length=scoring.max_length,
            device=device,
            name=_file(scoring),
            classes=scoring.classes,
        )
    except InputError as error:
        return f"{run.method.name}, seed {run.seed}, on {scoring.name}: {error}"
    return None


def score_on(run: PlannedRun, scoring: Scoring) -> dict[str, Any] | None:
    """Return the metrics of a run on further data; ``None`` until it is scored on these data."""
    from attnreg.experiments.results.saved_model import request  # late: it imports torch

    path = run.folder / "evaluations" / f"{_file(scoring)}.json"
    asked = request({"task": scoring.task}, scoring.data_dir, scoring.split, scoring.max_length, scoring.classes)
    try:
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content["metrics"]) if content.get("request") == asked else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"Cannot read the evaluation {path}: {error!r}.") from error


def _final(study: Study) -> list[PlannedRun]:
    chosen = [method for each in study.methods if (method := study.chosen(each)) is not None]
    return finished_of([run for method in chosen for run in study.final_runs(method)])


def _file(scoring: Scoring) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in scoring.name)
