"""From encoded rows to batches of similar lengths, padded no further than each batch needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader

from attnreg.experiments.tasks.kinds.base import REFERENCE, Kind
from attnreg.training.method import Batch


class Labelled(NamedTuple):
    """Rows to score a network on.

    Args:
        batches: what the network is given.
        references: what its answers are held against, one for each row, in order.
    """

    batches: list[Batch]
    references: list[Any]


class TrainBatches:
    """Shuffled, length-bucketed training batches; the order depends on the seed and the epoch alone.

    Several processes share each batch evenly; where its rows cannot be shared so, the first ones are repeated.

    Args:
        rows: encoded rows.
        batch_size: rows in a batch, of all processes together; the last one may be smaller.
        kind: knows how to pad.
        seed: of the order.
        accelerator: where the batches go.
    """

    def __init__(self, rows: Dataset, batch_size: int, kind: Kind, seed: int, accelerator: Accelerator) -> None:
        # Imported late: transformers' trainer modules import peft too, for two seconds, before anything can be said.
        from transformers.trainer_pt_utils import LengthGroupedSampler

        self._generator = torch.Generator()
        self._seed = seed
        lengths = [kind.length(ids) for ids in rows["input_ids"]]
        sampler = LengthGroupedSampler(batch_size, lengths=lengths, generator=self._generator)
        # With a generator of its own, a loader that starts again in the middle of an epoch draws nothing from torch's.
        self._loader = DataLoader(
            rows.remove_columns(REFERENCE),
            batch_size,
            sampler=sampler,
            collate_fn=_collate(kind, self._generator),
            generator=self._generator,
        )
        self._accelerator = accelerator

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, without the first ``skip``."""
        self._generator.manual_seed(self._seed * 1_000_003 + epoch)
        rank, processes = self._accelerator.process_index, self._accelerator.num_processes
        for number, batch in enumerate(self._loader):
            if number >= skip:
                rows = len(batch["labels"])
                share = torch.arange(rank, math.ceil(rows / processes) * processes, processes) % rows
                yield {
                    name: (tensor if processes == 1 else tensor[share]).to(self._accelerator.device)
                    for name, tensor in batch.items()
                }


def in_order(rows: Dataset, batch_size: int, kind: Kind, device: torch.device) -> Labelled:
    """The rows as they come, for evaluation, on a device: the same batches in every process."""
    # With a generator of its own: a loader draws a number whenever it starts, and how often a run is evaluated must
    # not change what it draws for training.
    given, generator = rows.remove_columns(REFERENCE), torch.Generator()
    loader = DataLoader(given, batch_size, collate_fn=_collate(kind, generator), generator=generator)
    batches: list[Batch] = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in loader]
    return Labelled(batches, list(rows[REFERENCE][:]))


def _collate(kind: Kind, generator: torch.Generator) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """How rows become a batch; what is drawn for it depends on the generator alone."""
    if not kind.draws:
        return kind.collate

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        seed = int(torch.randint(2**31, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPU's
            return kind.collate(rows)

    return collate
