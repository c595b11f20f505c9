"""Errors that a person can mend; the command line prints them as one sentence."""

from __future__ import annotations


class InputError(ValueError):
    """Something given to the program does not fit: says what was expected, what came, where, and what to do."""


class UsageError(InputError):
    """An option or argument that is wrong by itself; exit code 2."""
