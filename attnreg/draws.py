"""The randomness of one forward pass: numbers that follow from its seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from attnreg import functional
from attnreg.functional.seeded import is_traced


class Draws:
    """A source of random numbers, which gives the same ones again for the same seed, on any device.

    Each draw has numbers of its own, so that two draws are independent; draw in the same order to get them again.

    Args:
        seed: the seed: an integer, or int64, 0-d; ``None`` takes a new one from torch's generator for each draw.
        replayed: whether the numbers repeat those of an earlier pass.

    Example:
        >>> draws, again = Draws(3), Draws(3)
        >>> first, second = draws.uniform((2, 2)), draws.uniform((2, 2))
        >>> torch.equal(again.uniform((2, 2)), first), torch.equal(first, second)
        (True, False)
    """

    def __init__(self, seed: int | Tensor | None = None, *, replayed: bool = False) -> None:
        self.replayed = replayed
        self._seed = seed
        self._count = 0

    @property
    def seed(self) -> int | Tensor | None:
        """The seed: an integer, or int64, 0-d, while torch compiles or transforms a function."""
        return self._seed if self._seed is None or is_traced() else int(self._seed)

    def uniform(
        self, shape: Sequence[int], *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Draw numbers in ``[0, 1)``, multiples of 2^-24.

        Args:
            shape: their shape, ``(B, H, Q, K)`` or another.
            device: their device, which does not change them.
            dtype: their dtype.
        """
        return functional.seeded_uniform(self.next_seed(), shape, device=device).to(dtype)

    def keep(self, shape: Sequence[int], p: float | Tensor, *, device: torch.device | None = None) -> Tensor:
        """Draw decisions, bool, ``True`` = kept, which is the case with probability 1 - p.

        Args:
            shape: their shape, ``(B, H, Q, K)`` or another.
            p: drop probability; a tensor must be 0-d.
            device: their device, which does not change them.
        """
        return functional.seeded_keep(self.next_seed(), shape, p, device=device)

    def next_seed(self) -> int | Tensor:
        """Return a seed of its own for each draw."""
        seed = self.seed
        if seed is None:
            drawn = new_seed()
            return drawn if is_traced() else int(drawn)
        self._count += 1
        return functional.fold_seed(seed, self._count)


def new_seed() -> Tensor:
    """Draw a seed, int64, 0-d, from torch's global generator of the CPU, which checkpoints save and set back."""
    return torch.randint(2**62, ())


_latest: Draws | None = None


def draws_of_pass() -> Draws:
    """Return the source of the forward pass that begins, for ``prepare``; outside of one, a new source."""
    return Draws() if _latest is None else _latest


@contextmanager
def draws_from(draws: Draws) -> Iterator[None]:
    """Make :func:`draws_of_pass` return a source within the block."""
    global _latest
    before, _latest = _latest, draws
    try:
        yield
    finally:
        _latest = before
