"""The outcome of a fit: what its race chose, what that will score, and how it came to be."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnreg.experiments.fit.choice import Estimate
from attnreg.experiments.fit.rows import Numbers
from attnreg.experiments.fit.tries import Logits, Try


@dataclass
class Outcome:
    """The result of a fit. The out-of-fold results of tries are on the same rows."""

    best: Try
    estimate: Estimate  #: the score of the best try on new rows, trained on all rows
    in_folds: Estimate  #: the score of tries trained on the rows of folds
    tries: list[Try]  #: the tries in the race at its end
    scores: list[float]
    chosen: list[float]  #: share of bootstrap samples that choose a try, by try
    dropped: dict[Try, float]  #: the tries that were dropped, with their scores on their folds
    rows: Numbers  #: the rows that tries were scored on
    logits: Logits  #: of the best try on these rows, mean over repeats
    temperature: float
    decay: float  #: the power with which errors fall with the number of rows
    certain_decay: float  #: this power, less its standard error
    trained_on: float  #: share of all rows that tries were trained on
    trainings: int
    curve: dict[int, float]  #: scores of a linear probe, by the number of rows
    since: dict[Try, float]  #: seconds spent before the first training of a try, by try
    seconds: float  #: of the race
    in_bfloat16: bool  #: whether networks computed in bfloat16 in training
    at_a_time: int  #: trainings, at the end of the race
    ended: str  #: why the race ended, as a sentence
    averaged: list[Try] = field(default_factory=list)  #: the trainings on all rows, of which the model is the mean

    def summary(self) -> dict[str, object]:
        """Return what ``result.json`` holds."""
        fields = (
            "temperature", "decay", "certain_decay", "trained_on", "trainings",
            "seconds", "in_bfloat16", "at_a_time", "curve", "ended",
        )  # fmt: skip
        return {
            "best": str(self.best),
            "score": self.estimate._asdict(),
            "in_folds": self.in_folds._asdict(),
            "tries": {str(candidate): score for candidate, score in zip(self.tries, self.scores, strict=True)},
            "dropped": {str(candidate): score for candidate, score in self.dropped.items()},
            "averaged": [*map(str, self.averaged)],
            **{name: getattr(self, name) for name in fields},
        }
