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
from attnreg.experiments.tasks.columns import number_of

FEWEST = 4  # rows of a class
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
    """Labelled rows to fit: texts, class numbers, the classes, and for each row its unit, of which no fold has a part.

    A unit holds the rows of one group or, without groups, with the same texts.
    """

    texts: list[tuple[str, ...]]
    labels: Numbers
    classes: NDArray[Any]
    units: Numbers
    columns: Sequence[str]  #: names of the texts of a row

    @classmethod
    def checked(cls, given: Any, labels: Any, groups: Any = None) -> Rows:
        """Check rows; raise an ``InputError`` if there is nothing to learn from them, or too little."""
        texts = texts_in(given)
        try:
            answers = np.asarray(labels)
        except ValueError as error:  # lists of several lengths
            raise InputError(f"Expected one label for each row, got lists of several: {error}.") from error
        if answers.ndim != 1 or len(answers) != len(texts):
            raise InputError(f"Expected a label for each of {len(texts)} rows, got labels of shape {answers.shape}.")
        if not texts:
            raise InputError("There are no rows to fit.")
        values = answers.tolist()
        for row, each in enumerate(values):
            if isinstance(each, (list, tuple, set, dict)):
                raise InputError(f"Expected one label for each row, got {each!r} in row {row}.")
            if is_missing(each):
                raise InputError(f"Row {row} has no label: leave it out.")
        as_numbers = [number_of(each) for each in values]
        fraction = next((each for each in as_numbers if each is not None and each % 1), None)
        if fraction is not None and None not in as_numbers:
            raise InputError(
                f"The labels are numbers, such as {fraction:g}, not classes: round them, or train a regressor with "
                "`attnreg recipe finetune --task regression`."
            )
        try:
            classes, numbers = np.unique(answers, return_inverse=True)
        except TypeError as error:
            raise InputError(f"Expected labels of one type, got several: {error}.") from error
        if len(classes) < 2:
            raise InputError(f"All {len(texts)} rows have the label {classes[0]}: there is nothing to learn.")
        units = _units(texts, groups)
        in_class = [len({*units[numbers == number].tolist()}) for number in range(len(classes))]
        what = "rows that differ" if groups is None else "groups"
        few = [f"{name} ({count})" for name, count in zip(classes, in_class, strict=True) if count < FEWEST]
        if len(classes) == len(texts):
            raise InputError(
                f"Each class needs at least {FEWEST} {what}, but all {len(texts)} rows have different labels, such as "
                f"{classes[0]} and {classes[1]}: give the column of labels, not of row numbers."
            )
        if few:
            raise InputError(
                f"Each class needs at least {FEWEST} {what}, but too few have {listed(few, _SHOWN)}: add rows, or "
                "leave these classes out."
            )
        columns = [*map(str, given.columns)] if hasattr(given, "columns") else COLUMNS[: len(texts[0])]
        return cls(texts, numbers.astype(np.int64), classes, units, columns)

    def __len__(self) -> int:
        return len(self.texts)

    def content(self) -> str:
        """Return a checksum of the rows."""
        whole = [self.texts, self.labels.tolist(), self.classes.tolist(), self.units.tolist()]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()

    def repeats(self, seed: int) -> Iterator[list[tuple[Numbers, Numbers]]]:
        """Yield divisions into folds, each a list of rows to train on and rows to hold out; one if rows are many."""
        from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

        fewest = int(np.bincount(self.labels).min())
        groups = None if len({*self.units.tolist()}) == len(self) else self.units
        for number in range(3 if len(self) < _REPEATED else 1):
            options = {"n_splits": min(FOLDS, fewest), "shuffle": True, "random_state": seed + number}
            divided = StratifiedKFold(**options) if groups is None else StratifiedGroupKFold(**options)
            draw = np.random.default_rng(seed + number)
            yield [
                (train, np.sort(draw.permutation(held)[:_MOST_HELD]))
                for train, held in divided.split(self.labels, self.labels, groups)
            ]


def _units(texts: Sequence[tuple[str, ...]], groups: Any) -> Numbers:
    """Number the units of rows: those of one group or, without groups, with the same texts."""
    named = [" ".join(" ".join(row).casefold().split()) for row in texts] if groups is None else np.asarray(groups)
    if len(named) != len(texts):
        raise InputError(f"Expected a group for each of {len(texts)} rows, got {len(named)}.")
    return np.unique(named, return_inverse=True)[1]
