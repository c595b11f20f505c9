"""Suggest the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest known name, to end an error message; empty if none is near.

    Example:
        >>> did_you_mean("colas", ["cola", "rte"]), did_you_mean("drophead", ["DropHead"]), did_you_mean("xyz", ["rte"])
        (' Did you mean cola?', ' Did you mean DropHead?', '')
    """
    spelled = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f" Did you mean {spelled[nearest[0]]}?" if nearest else ""
