"""Whether a lower precision is faster on a CPU: some have no instructions for it."""

from __future__ import annotations

import functools
import time
import warnings

import torch

from attnreg.errors import AttnRegWarning

SIZE, REPEATS = 256, 5
CLEARLY = 1.2


@functools.cache
def times_float32(dtype: torch.dtype) -> float:
    """Return how long a matrix product in ``dtype`` takes on this CPU, in float32's time: the best of a few."""
    best: dict[torch.dtype, float] = {}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(1 + REPEATS):  # first call: the kernel is made
            for each in (torch.float32, dtype):
                x = torch.ones(SIZE, SIZE, dtype=each, device="cpu")
                begin = time.perf_counter()
                x @ x
                best[each] = min(best.get(each, float("inf")), time.perf_counter() - begin)
    return best[dtype] / best[torch.float32]


@functools.cache
def warn_if_slower(dtype: torch.dtype) -> None:
    """Warn once per process if products in ``dtype``, for which the first pass is to use it, are slower on this CPU."""
    if (ratio := times_float32(dtype)) > CLEARLY:
        name = str(dtype).removeprefix("torch.")
        warnings.warn(
            f"`first_pass_dtype={name!r}` makes AD-DROP slower here: on this CPU, a matrix product takes {ratio:.1f} "
            f"times as long in {name} as in float32. Leave `first_pass_dtype` out.",
            AttnRegWarning,
            stacklevel=3,
        )
