"""The rows of a fit: texts and labels as scikit-learn's users give them, checked, and the folds that score tries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnreg.errors import InputError, listed
from attnreg.experiments.fit.answers import Answers, Values, numbers_in
from attnreg.experiments.tasks.columns import number_of

FEWEST = 4  # rows of a class
_FEWEST_NUMBERS = 20  # rows, if labels are numbers
_AS_NUMBERS = "predict them as they are with --metric pearson (in Python, `TextRegressor`)"
FOLDS = 5
_MOST_HELD = 2000  # rows of a fold that are scored
_REPEATED = 1000  # rows below which folds are repeated with other divisions
_SHOWN = 5
COLUMNS = ("text", "text_pair")
Numbers = NDArray[np.int64]


def is_missing(label: Any) -> bool:
    """Whether a label is none: ``None``, not a number, pandas' ``NA`` or an empty text."""
    try:
        return label is None or bool(label != label) or not str(label).strip()
    except TypeError:  # NA has no truth value
        return True


def texts_in(given: Any) -> list[tuple[str, ...]]:
    """Return the texts of each row, one or two, of a list, an array, or a series or frame of pandas.

    Raises:
        InputError: if the rows are no texts, or not alike.
    """
    values = given.to_numpy() if hasattr(given, "to_numpy") else given
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise InputError(f"Expected a list of texts or of pairs of texts, got a {type(given).__name__}.")
    rows = [(each,) if isinstance(each, str) else each for each in values]
    for number, row in enumerate(rows):
        if not isinstance(row, (tuple, list, np.ndarray)) or not all(isinstance(each, str) for each in row):
            raise InputError(f"Expected texts, got {row!r} in row {number}.")
        if len(row) != len(rows[0]) or not 1 <= len(row) <= len(COLUMNS):
            raise InputError(f"Expected one text or two in each row, got {len(row)} in row {number}.")
    return [tuple(map(str, row)) for row in rows]


@dataclass
class Rows:
    """Labelled rows to fit: texts, class numbers or standardized numbers, and for each row its unit.

    A unit holds the rows of one group or, without groups, with the same texts; no fold has a part of one.
    """

    texts: list[tuple[str, ...]]
    labels: Values
    answers: Answers
    units: Numbers
    columns: Sequence[str]  #: names of the texts of a row

    @classmethod
    def checked(
        cls, given: Any, labels: Any, groups: Any = None, *, metric: str | None = None, numbers: bool = False
    ) -> Rows:
        """Check rows, labelled with classes or ``numbers``; raise an ``InputError`` if there is too little to learn."""
        texts = texts_in(given)
        try:
            answers = np.asarray(labels)
        except ValueError as error:  # lists of several lengths
            raise InputError(f"Expected one label for each row, got lists of several: {error}.") from error
        if answers.ndim != 1 or len(answers) != len(texts):
            raise InputError(f"Expected a label for each of {len(texts)} rows, got labels of shape {answers.shape}.")
        if not texts:
            raise InputError("There are no rows to fit.")
        for row, each in enumerate(answers.tolist()):
            if isinstance(each, (list, tuple, set, dict)):
                raise InputError(f"Expected one label for each row, got {each!r} in row {row}.")
            if is_missing(each):
                raise InputError(f"Row {row} has no label: leave it out.")
        units = _units(texts, groups)
        what = "rows that differ" if groups is None else "groups"
        made, values = (_numbers if numbers else _classes)(answers, metric, units, what)
        columns = [*map(str, given.columns)] if hasattr(given, "columns") else COLUMNS[: len(texts[0])]
        return cls(texts, values, made, units, columns)

    def __len__(self) -> int:
        return len(self.texts)

    def content(self) -> str:
        """Return a checksum of the rows."""
        classes = None if self.answers.classes is None else self.answers.classes.tolist()
        whole = [self.texts, self.labels.tolist(), classes, self.units.tolist()]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()

    def repeats(self, seed: int) -> Iterator[list[tuple[Numbers, Numbers]]]:
        """Yield divisions into folds, each a list of rows to train on and rows to hold out; one if rows are many."""
        from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

        strata = self.answers.strata(self.labels)
        fewest = int(np.bincount(strata).min())
        groups = None if len({*self.units.tolist()}) == len(self) else self.units
        for number in range(3 if len(self) < _REPEATED else 1):
            options = {"n_splits": min(FOLDS, fewest), "shuffle": True, "random_state": seed + number}
            divided = StratifiedKFold(**options) if groups is None else StratifiedGroupKFold(**options)
            draw = np.random.default_rng(seed + number)
            yield [
                (train, np.sort(draw.permutation(held)[:_MOST_HELD]))
                for train, held in divided.split(strata, strata, groups)
            ]


def _units(texts: Sequence[tuple[str, ...]], groups: Any) -> Numbers:
    """Number the units of rows: those of one group or, without groups, with the same texts."""
    named = [" ".join(" ".join(row).casefold().split()) for row in texts] if groups is None else np.asarray(groups)
    if len(named) != len(texts):
        raise InputError(f"Expected a group for each of {len(texts)} rows, got {len(named)}.")
    return np.unique(named, return_inverse=True)[1]


def _classes(labels: NDArray[Any], metric: str | None, units: Numbers, what: str) -> tuple[Answers, Numbers]:
    """Return the classes of labels, and the class number of each; raise if a class has too few units."""
    found = [number_of(each) for each in labels.tolist()]
    are_numbers = None not in found
    fraction = next((each for each in found if each is not None and each % 1), None)
    if fraction is not None and are_numbers:
        raise InputError(f"The labels are numbers, such as {fraction:g}, not classes: {_AS_NUMBERS}, or round them.")
    try:
        classes, numbers = np.unique(labels, return_inverse=True)
    except TypeError as error:
        raise InputError(f"Expected labels of one type, got several: {error}.") from error
    if len(classes) < 2:
        raise InputError(f"All {len(labels)} rows have the label {classes[0]}: there is nothing to learn.")
    in_class = [len({*units[numbers == number].tolist()}) for number in range(len(classes))]
    few = [f"{name} ({count})" for name, count in zip(classes, in_class, strict=True) if count < FEWEST]
    if len(classes) == len(labels):
        raise InputError(
            f"Each class needs at least {FEWEST} {what}, but all {len(labels)} rows have different labels, such as "
            f"{classes[0]} and {classes[1]}: give the column of labels, not of row numbers."
        )
    if few:
        or_numbers = f", or {_AS_NUMBERS} if labels are amounts" * are_numbers
        raise InputError(
            f"Each class needs at least {FEWEST} {what}, but too few have {listed(few, _SHOWN)}: add rows, or "
            f"leave these classes out{or_numbers}."
        )
    return Answers.of(metric, classes), numbers.astype(np.int64)


def _numbers(
    labels: NDArray[Any], metric: str | None, units: Numbers, what: str
) -> tuple[Answers, NDArray[np.float64]]:
    """Return what is known of labels that are numbers, and these standardized; raise if there are too few."""
    found = numbers_in(labels.tolist(), range(len(labels)))
    numbers = np.array(found)
    if np.ptp(numbers) == 0:
        raise InputError(f"All {len(numbers)} rows have the label {numbers[0]:g}: there is nothing to learn.")
    if (many := len({*units.tolist()})) < _FEWEST_NUMBERS:
        raise InputError(f"To learn numbers takes at least {_FEWEST_NUMBERS} {what}, got {many}: add rows.")
    answers = Answers.of(metric, None, found)
    return answers, (numbers - answers.center) / answers.scale
