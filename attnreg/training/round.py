"""What AttendOut's game remembers of a round: inputs and actions, one bit per unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnreg import functional
from attnreg.training.method import Batch


@dataclass(frozen=True)
class Move:
    """One step's inputs and the masks that were drawn for them."""

    batch: Batch
    packed: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, keep: Tensor, *, with_labels: bool) -> Move:
        """Remember a step.

        Args:
            batch: the model's inputs.
            keep: bool, ``(B, L, M, N, N)``, the masks.
            with_labels: keep the labels too, to score the networks on this batch.
        """
        small = {name: _small(tensor) for name, tensor in batch.items() if with_labels or name != "labels"}
        return cls(small, functional.pack_bits(keep), tuple(keep.shape))

    @property
    def inputs(self) -> Batch:
        """The inputs, in the dtypes that models take."""
        return {n: t.long() if t.dtype == torch.int32 else t for n, t in self.batch.items()}

    @property
    def keep(self) -> Tensor:
        """The masks, bool, ``(B, L, M, N, N)``."""
        return functional.unpack_bits(self.packed, self.shape)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self.packed.nbytes + sum(tensor.nbytes for tensor in self.batch.values())

    def state_dict(self) -> dict[str, Any]:
        """The move as plain data."""
        batch = {name: tensor.cpu() for name, tensor in self.batch.items()}
        return {"batch": batch, "packed": self.packed.cpu(), "shape": list(self.shape)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device) -> Move:
        """Undo :meth:`state_dict`."""
        batch = {name: tensor.to(device) for name, tensor in state["batch"].items()}
        return cls(batch, state["packed"].to(device), tuple(state["shape"]))


def _small(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32) if tensor.dtype == torch.long else tensor
