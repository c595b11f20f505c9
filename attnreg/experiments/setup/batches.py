"""Batch encoded rows by similar length, and pad a batch to its longest row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader

from attnreg.experiments.tasks.kinds.kind import REFERENCE, Kind
from attnreg.outputs import rows_of
from attnreg.training.method import Batch


class Labelled(NamedTuple):
    """Rows to score a network on: its inputs in batches, and the expected answers, one per row."""

    batches: list[Batch]
    references: list[Any]
    order: list[int]  #: the position of the reference, per row of the batches


class TrainBatches:
    """Shuffled training batches of rows of similar length. The order depends only on the seed and the epoch.

    Several processes split a batch evenly. If its rows do not divide evenly, the first rows are repeated.
    """

    def __init__(
        self,
        rows: Dataset,
        batch_size: int,
        kind: Kind,
        seed: int,
        device: torch.device,
        *,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        # Imported late: transformers' trainer modules also import peft, which takes two seconds.
        from transformers.trainer_pt_utils import LengthGroupedSampler

        self._generator = torch.Generator()
        self._seed = seed
        sampler = LengthGroupedSampler(batch_size, lengths=kind.lengths(rows), generator=self._generator)
        # With a generator, a loader that restarts within an epoch draws nothing from torch's global one.
        self._loader = DataLoader(
            rows.remove_columns(REFERENCE),
            batch_size,
            sampler=sampler,
            collate_fn=_collate(kind, self._generator),
            generator=self._generator,
        )
        self._device, self._rank, self._processes = device, rank, processes

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, except the first ``skip``."""
        self._generator.manual_seed(self._seed * 1_000_003 + epoch)
        rank, processes = self._rank, self._processes
        for number, batch in enumerate(self._loader):
            if number >= skip:
                rows = rows_of(batch)
                share = torch.arange(rank, math.ceil(rows / processes) * processes, processes) % rows
                yield {
                    name: (tensor if processes == 1 else tensor[share]).to(self._device)
                    for name, tensor in batch.items()
                }


def to_score(rows: Dataset, batch_size: int, kind: Kind, device: torch.device) -> Labelled:
    """Batch rows of similar length, which takes less padding, together with their reference answers."""
    rows = kind.to_score(rows)
    lengths = kind.lengths(rows)
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    return Labelled(in_order(rows.select(order), batch_size, kind, device), list(rows[REFERENCE][:]), order)


def in_order(rows: Dataset, batch_size: int, kind: Kind, device: torch.device) -> list[Batch]:
    """Batch rows in their order on a device. Every process gets the same batches."""
    # A loader draws a number whenever it starts. With a generator, evaluating more often does not change the
    # random numbers of training.
    inputs, generator = rows.remove_columns(REFERENCE), torch.Generator()
    loader = DataLoader(inputs, batch_size, collate_fn=_collate(kind, generator), generator=generator)
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in loader]


def _collate(kind: Kind, generator: torch.Generator) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Return the function that makes a batch of rows; its random draws depend only on the generator."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        seed = int(torch.randint(2**31, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPU's
            return kind.collate(rows)

    return collate
