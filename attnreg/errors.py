"""Errors that a person can mend; the command line prints them as one sentence."""

from __future__ import annotations


class InputError(ValueError):
    """Something given to the program does not fit: says what was expected, what came, where, and what to do."""


class UsageError(InputError):
    """An option or argument that is wrong by itself; exit code 2."""


class StoppedError(RuntimeError):
    """A run that ended before its time; what it had is kept.

    Args:
        message: why, and where what it had is.
        exit_code: of the command line.
        can_go_on: whether the same run can be resumed.
    """

    def __init__(self, message: str, *, exit_code: int = 1, can_go_on: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.can_go_on = can_go_on


class AttnRegWarning(UserWarning):
    """Something that is probably not meant; the command line prints it as one sentence."""


class AsleepWarning(AttnRegWarning):
    """A regularizer cannot act as it should, for something that it was not told."""
