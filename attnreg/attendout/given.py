"""Masks that were drawn before the forward pass that takes them."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from attnreg.draws import draws_of_pass

REMEMBERED = 64  # passes


class GivenMasks:
    """Whether a forward pass takes masks that were drawn before it, or draws its own.

    Example:
        >>> given = GivenMasks()
        >>> given.give()
        >>> given.taken(), given.taken()
        (True, False)
    """

    def __init__(self) -> None:
        self._waiting = False
        self._ever = False
        self._seed: int | Tensor | None = None  # of the pass that took them, as long as they are there
        self._own: deque[int] = deque(maxlen=REMEMBERED)  # seeds of passes that drew their own

    def give(self) -> None:
        """Give the next forward pass the masks that were just drawn."""
        self._waiting = self._ever = True

    def taken(self) -> bool:
        """Begin a forward pass; return whether it takes the masks that are there.

        Raises:
            RuntimeError: if the pass repeats one that may have taken masks that are gone.
        """
        draws = draws_of_pass()
        if self._waiting:
            self._waiting, self._seed = False, draws.seed
            return True
        if not draws.replayed:
            self._seed = None
            if self._ever and isinstance(draws.seed, int):
                self._own.append(draws.seed)
            return False
        if self._seed != draws.seed and self._ever and draws.seed not in self._own:
            raise RuntimeError("The masks that were sampled for that pass are gone: replay only the latest pass.")
        if self._seed == draws.seed:
            return True
        self._seed = None
        return False
