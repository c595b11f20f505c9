"""Refuse names in a class that are nearly those of the base class, which nobody would ever read."""

from __future__ import annotations

import difflib
import inspect

NEAR = 0.9  # of 1, as difflib measures likeness: one letter in ten


def check_names(cls: type, base: type) -> None:
    """Check the public names that a class defines against those that a base class documents.

    A name of several words, such as ``looks_at_batch``, is refused if it is nearly one of the base class. A name of one
    word, such as ``attributes``, may well be meant: it is refused only for a method with the original's parameters.

    Args:
        cls: the new class.
        base: the base class.

    Raises:
        TypeError: if a name is probably misspelt.
    """
    known = {name for name in vars(base) if not name.startswith("_")}
    for name, value in vars(cls).items():
        if name.startswith("_") or any(name in vars(parent) for parent in cls.__mro__[1:]):
            continue
        near = next(iter(difflib.get_close_matches(name, known, n=1, cutoff=NEAR)), None)
        if near is not None and ("_" in near or near == "schedulable" or _fits(value, getattr(base, near))):
            raise TypeError(
                f"{cls.__name__}.{name} would never be read. Did you mean {near}? If not, choose a name that is less "
                "like it, or begin it with an underscore."
            )


def _fits(value: object, original: object) -> bool:
    """Whether both are methods with the same parameters."""
    if not inspect.isfunction(value) or not inspect.isfunction(original):
        return False
    return list(inspect.signature(value).parameters) == list(inspect.signature(original).parameters)
