"""Notice that rounding removes noise."""

from __future__ import annotations

import warnings

from torch import Tensor

from attnreg.functional.seeded import is_traced


class Rounding:
    """Warns once if at least half of the noise that ``owner`` adds to values in half precision is lost."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._has_looked = False

    def add(self, values: Tensor, noise: Tensor) -> Tensor:
        """Return the sum of values and noise, of one shape."""
        noisy = values + noise
        if self._has_looked or noisy.dtype.itemsize > 2 or is_traced():
            return noisy
        self._has_looked = True
        lost = float(((noisy == values) & (noise != 0)).sum() / (noise != 0).sum().clamp(min=1))
        if lost >= 0.5:
            warnings.warn(
                f"{lost:.0%} of the noise of {self._owner} is lost, because it is smaller than the rounding of "
                f"{noisy.dtype}. Use larger noise, or keep the model in float32 and train with autocast.",
                stacklevel=2,
            )
        return noisy
