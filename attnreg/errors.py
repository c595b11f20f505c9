"""Errors that the user can fix; the command line prints them without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class InputError(ValueError):
    """An input does not fit; the message states the problem, its place and the fix."""


class UsageError(InputError):
    """An option or argument is wrong; the exit code is 2."""


class StoppedError(RuntimeError):
    """A run stopped early; its results so far are kept.

    Args:
        message: the reason, and where the results are.
        exit_code: exit code of the command line.
        can_go_on: whether the run can be resumed.
    """

    def __init__(self, message: str, *, exit_code: int = 1, can_go_on: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.can_go_on = can_go_on


class NoAttentionError(InputError):
    """Attention in a model is missing, hidden, or not as expected."""


class AttnRegWarning(UserWarning):
    """A probable mistake; the command line prints it as one sentence."""


class CoverageWarning(AttnRegWarning):
    """Some attention of a model is not masked."""


class AsleepWarning(AttnRegWarning):
    """A regularizer does not act as it should, because nobody told it the epoch, the step or the like."""


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


def counted(number: object, noun: str) -> str:
    """Return a number and its noun, which has an s unless the number is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Join names by commas; of more than ``most``, say how many are left out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest known name, to end an error message; empty if none is near.

    Example:
        >>> did_you_mean("colas", ["cola", "rte"]), did_you_mean("GNet", ["GNetProvider"]), did_you_mean("xyz", ["rte"])
        (' Did you mean cola?', ' Did you mean GNetProvider?', '')
    """
    spelled = {candidate.lower(): candidate for candidate in known}
    longer = [candidate for candidate in spelled if len(name) > 3 and candidate.startswith(name.lower())]
    nearest = difflib.get_close_matches(name.lower(), spelled, n=1) or longer
    return f" Did you mean {spelled[nearest[0]]}?" if nearest else ""
