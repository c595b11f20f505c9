"""The scores of a predictor that ignores its input, which a network has to beat."""

from __future__ import annotations

from typing import Any

from attnreg.experiments.setup.setup import Setup
from attnreg.experiments.tasks.kinds.kind import REFERENCE


def trivial_scores(run: Setup, scored_train: Any) -> dict[str, Any] | None:
    """Score the prediction that suits most training rows, made for every row.

    Args:
        run: the run.
        scored_train: the training rows that are scored.

    Returns:
        ``predictor`` (its name), and the metrics on ``dev`` and ``train``; ``None`` if the kind of task has no such
        predictor.
    """
    trivial = run.kind.trivial(run.train_rows[REFERENCE][:])
    if trivial is None:
        return None
    name, answer = trivial
    scores = {
        split: run.kind.score([{"label": label, "prediction": answer} for label in rows[REFERENCE][:]])
        for split, rows in (("dev", run.dev_rows), ("train", scored_train))
    }
    return {"predictor": name, **scores}
