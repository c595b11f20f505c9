"""The rows of a fit: texts and labels in the forms of scikit-learn, checked, and the folds that score tries."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
MANY = 1000  # rows; fewer are divided into folds several times, and contrasted first
COLUMNS = ("text", "text_pair")
Numbers = NDArray[np.int64]


def is_missing(label: Any) -> bool:
    """Whether a label is missing: ``None``, not a number, pandas' ``NA`` or an empty text."""
    try:
        return label is None or bool(label != label) or not str(label).strip()
    except TypeError:  # NA has no truth value
        return True


def texts_in(data: Any) -> list[tuple[str, ...]]:
    """Return the one or two texts per row of a list, an array, or a series or frame of pandas.

    Raises:
        InputError: if the rows are no texts, or differ in the number of texts.
    """
    values = data.to_numpy() if hasattr(data, "to_numpy") else data
    if isinstance(values, str) or not np.iterable(values):
        raise InputError(f"Expected a list of texts or of pairs of texts, got a {type(data).__name__}.")
    rows = [(value,) if isinstance(value, str) else value for value in values]
    for number, row in enumerate(rows):
        if not isinstance(row, (tuple, list, np.ndarray)) or not all(isinstance(text, str) for text in row):
            raise InputError(f"Expected texts, got {row!r} in row {number}.")
        if len(row) != len(rows[0]) or not 1 <= len(row) <= len(COLUMNS):
            raise InputError(f"Expected one text or two per row, got {len(row)} in row {number}.")
    return [tuple(map(str, row)) for row in rows]


@dataclass
class Rows:
    """Labelled rows to fit: texts, class numbers or standardized numbers, and units.

    A unit is the rows of one group or, without groups, all rows with the same texts; folds never divide a unit.
    """

    texts: list[tuple[str, ...]]
    labels: Values
    answers: Answers
    units: Numbers
    columns: Sequence[str]  #: names of the texts of a row

    @classmethod
    def checked(
        cls, data: Any, labels: Any, groups: Any = None, *, metric: str | None = None, numbers: bool = False
    ) -> Rows:
        """Check rows, labelled with classes or ``numbers``; raise an ``InputError`` if they cannot be learned."""
        texts = texts_in(data)
        try:
            array = np.asarray(labels)
        except ValueError as error:  # lists of several lengths
            raise InputError(f"Expected one label per row, got lists of several: {error}.") from error
        if array.ndim != 1 or len(array) != len(texts):
            raise InputError(f"Expected labels for {len(texts)} rows, got labels of shape {array.shape}.")
        if not texts:
            raise InputError("There are no rows to fit.")
        for row, label in enumerate(labels):  # an array of texts would hold a missing label as the text nan
            if isinstance(label, (list, tuple, set, dict)):
                raise InputError(f"Expected one label per row, got {label!r} in row {row}.")
            if is_missing(label):
                raise InputError(f"Row {row} has no label: leave it out.")
        if array.dtype == object:  # perhaps of numpy's numbers, which JSON does not take
            plain = [label.item() if isinstance(label, np.generic) else label for label in array]
            array = np.array(plain, dtype=object)
        units = units_of(texts, groups)
        plural = "rows that differ" if groups is None else "groups"
        answers, values = (_numbers if numbers else _classes)(array, metric, units, plural)
        columns = [*map(str, data.columns)] if hasattr(data, "columns") else COLUMNS[: len(texts[0])]
        return cls(texts, values, answers, units, columns)

    def __len__(self) -> int:
        return len(self.texts)

    def content(self) -> str:
        """Return a checksum of the rows."""
        classes = None if self.answers.classes is None else self.answers.classes.tolist()
        content = [self.texts, self.labels.tolist(), classes, self.units.tolist()]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def repeats(self, seed: int) -> Iterator[list[tuple[Numbers, Numbers]]]:
        """Yield divisions into folds, as pairs of rows to train on and rows to hold out; only one if rows are many."""
        from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

        strata = self.answers.strata(self.labels)
        fewest = int(np.bincount(strata).min())
        groups = None if len({*self.units.tolist()}) == len(self) else self.units
        # Of rare classes, which macro F1 counts like all others, a small part of the rows would have too few.
        most = _MOST_HELD * (5 if self.answers.metric == "macro_f1" else 1)
        for number in range(3 if len(self) < MANY else 1):
            parts = min(FOLDS, fewest, len({*self.units.tolist()}))
            options = {"n_splits": parts, "shuffle": True, "random_state": seed + number}
            divided = StratifiedKFold(**options) if groups is None else StratifiedGroupKFold(**options)
            draw = np.random.default_rng(seed + number)
            yield [
                (train, np.sort(draw.permutation(held)[:most])) for train, held in divided.split(strata, strata, groups)
            ]


def units_of(texts: Sequence[tuple[str, ...]], groups: Any) -> Numbers:
    """Return the unit number of every row: of its group or, without groups, of its texts."""
    names = [" ".join(" ".join(row).casefold().split()) for row in texts] if groups is None else np.asarray(groups)
    if len(names) != len(texts):
        raise InputError(f"Expected groups for {len(texts)} rows, got {len(names)}.")
    if groups is not None:
        check_groups(groups, range(len(texts)))
    return np.unique(names, return_inverse=True)[1]


def check_groups(groups: Iterable[Any], row_numbers: Sequence[int]) -> None:
    """Raise, with its row number, if a row has no group."""
    for row, name in zip(row_numbers, groups, strict=True):
        if is_missing(name):
            raise InputError(f"Row {row} has no group: give it one of its own, or leave it out.")


def units_per_class(labels: Sequence[Any], units: Numbers) -> Counter[Any]:
    """Return how many units every class has."""
    return Counter(label for label, _ in {*zip(labels, units.tolist(), strict=True)})


def _classes(labels: NDArray[Any], metric: str | None, units: Numbers, plural: str) -> tuple[Answers, Numbers]:
    """Return the classes and the class number of every label; raise if a class has too few units."""
    if odd := [label for label in labels if not isinstance(label, (str, int, float, np.number, np.bool_))]:
        raise InputError(f"Expected labels that are texts or numbers, got {odd[0]!r}: give their texts, `str(label)`.")
    amounts = [number_of(label) for label in labels.tolist()]
    are_numbers = None not in amounts
    fraction = next((amount for amount in amounts if amount is not None and amount % 1), None)
    if fraction is not None and are_numbers:
        raise InputError(f"The labels are numbers, such as {fraction:g}, not classes: {_AS_NUMBERS}, or round them.")
    try:
        classes, numbers = np.unique(labels, return_inverse=True)
    except TypeError as error:
        raise InputError(f"Expected labels of one type, got several: {error}.") from error
    if len(classes) < 2:
        raise InputError(f"All {len(labels)} rows have the label {classes[0]}: there is nothing to learn.")
    counts = units_per_class(numbers.tolist(), units)
    few = [f"{name} ({counts[number]})" for number, name in enumerate(classes) if counts[number] < FEWEST]
    if len(classes) == len(labels):
        raise InputError(
            f"A class needs at least {FEWEST} {plural}, but all {len(labels)} rows have different labels, such as "
            f"{classes[0]} and {classes[1]}: give the column of labels, not of row numbers."
        )
    if few:
        or_numbers = f", or {_AS_NUMBERS} if labels are amounts" * are_numbers
        raise InputError(
            f"A class needs at least {FEWEST} {plural}, but too few have {listed(few)}: add rows, or "
            f"leave these classes out (`attnreg fit --drop-rare`){or_numbers}."
        )
    return Answers.of(metric, classes), numbers.astype(np.int64)


def _numbers(
    labels: NDArray[Any], metric: str | None, units: Numbers, plural: str
) -> tuple[Answers, NDArray[np.float64]]:
    """Return the answers for labels that are numbers, and the standardized numbers; raise if there are too few."""
    amounts = numbers_in(labels.tolist(), range(len(labels)))
    numbers = np.array(amounts)
    if np.ptp(numbers) == 0:
        raise InputError(f"All {len(numbers)} rows have the label {numbers[0]:g}: there is nothing to learn.")
    if (count := len({*units.tolist()})) < _FEWEST_NUMBERS:
        raise InputError(f"To learn numbers takes at least {_FEWEST_NUMBERS} {plural}, got {count}: add rows.")
    answers = Answers.of(metric, None, amounts)
    return answers, (numbers - answers.center) / answers.scale
