"""Answers that are spans of a text: the best span of two rows of logits, and how SQuAD compares texts."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return a text as SQuAD compares it: in small letters, without punctuation, articles and further spaces.

    Reference:
        SQuAD (arXiv 1606.05250), Section 6.1.

    Example:
        >>> normalized(" The  U.S. Army,")
        'us army'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the words of a predicted text, both texts normalized; 1 if both have no words.

    Reference:
        SQuAD (arXiv 1606.05250), Section 6.1; SQuAD 2.0 (arXiv 1806.03822) for texts without words.

    Example:
        >>> word_f1("the red house", "a house"), word_f1("", ""), word_f1("", "house")
        (0.6666666666666666, 1.0, 0.0)
    """
    ours, theirs = Counter(normalized(prediction).split()), Counter(normalized(reference).split())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def best_span(start: NDArray[np.floating], end: NDArray[np.floating], longest: int) -> tuple[int, int, float]:
    """Return the first and the last token of the span with the highest sum of start and end, and this sum.

    Args:
        start: logits of where the answer begins, ``(n,)``, with n of at least 1.
        end: logits of where it ends, ``(n,)``.
        longest: largest number of tokens.

    Example:
        >>> import numpy as np
        >>> best_span(np.array([0.0, 1.0, 5.0]), np.array([2.0, 4.0, 0.0]), longest=2)
        (1, 1, 5.0)
    """
    import numpy as np

    sums = start[:, None] + end[None, :]
    size = np.arange(len(end))[None, :] - np.arange(len(start))[:, None]
    sums = np.where((size >= 0) & (size < longest), sums, -np.inf)
    first, last = np.unravel_index(sums.argmax(), sums.shape)
    return int(first), int(last), float(sums[first, last])
