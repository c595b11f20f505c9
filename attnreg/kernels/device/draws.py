"""A draw, as the operators of torch take it and as the kernels do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.kernels.seeds import mix_64, seed_parts


class Draw(NamedTuple):
    """One draw, as an operator of torch takes it."""

    seed: int | Tensor
    rate: float | Tensor
    samples: Tensor | None
    queries: Tensor | None  # index of the first query: one for all samples, or one per sample
    keys: Tensor | None
    first_query: int = 0
    by_sample: int = 1
    by_head: int = 1
    divide: int = 0

    @property
    def argument(self) -> tuple[Any, ...] | None:
        """The argument of kernels, see `device.hashing`; ``None`` if nothing is dropped."""
        rate = float(self.rate) if not isinstance(self.rate, Tensor) or self.rate.is_cpu else self.rate
        if isinstance(rate, float) and rate <= 0:
            return None
        tables: list[Any] = []
        for table in (self.queries, self.keys):
            tables += (None, 0) if table is None else (table, int(table.numel() > 1))
        if isinstance(rate, float):
            number, at, divide = rate, None, 1.0 - rate if self.divide and rate < 1 else 1.0
        else:
            number, at, divide = 0.0, rate, float(self.divide)
        parts = seed_parts(mix_64(int(self.seed)) + self.first_query)  # the hash adds them
        return (*parts, number, at, divide, self.by_sample, self.by_head, self.samples, *tables)


def table_of(table: int | Tensor | None, samples: int, device: torch.device) -> tuple[int, Tensor | None, bool]:
    """Return indices as one number, or as a table with one per sample; and whether they have one of these forms.

    A table is ``(..., B, 1, 1)``, which broadcasts to samples, heads and queries.
    """
    if not isinstance(table, Tensor):
        return table or 0, None, True
    one = table.numel() == 1
    fits = one or (table.numel() == samples and table.ndim > 2 and table.shape[-3] == samples)
    return 0, table.reshape(-1).to(device), fits
