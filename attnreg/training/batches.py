"""From rows of text to batches of similar lengths, padded no further than each batch needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

from attnreg.tasks.task import Task
from attnreg.training.method import Batch


def encode(task: Task, rows: Dataset, tokenizer: Any, max_length: int) -> Dataset:
    """Tokenize a split: ``input_ids``, ``attention_mask``, what else the tokenizer gives, and ``labels``."""

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [batch[column] for column in task.columns]
        return {**tokenizer(*texts, truncation=True, max_length=max_length), "labels": batch["label"]}

    return rows.map(tokenize, batched=True, remove_columns=rows.column_names, keep_in_memory=True)


class TrainBatches:
    """Shuffled, length-bucketed training batches; the order depends on the seed and the epoch alone.

    Several processes share each batch evenly; where its rows cannot be shared so, the first ones are repeated.

    Args:
        rows: encoded rows.
        batch_size: rows in a batch, of all processes together; the last one may be smaller.
        tokenizer: knows how to pad.
        seed: of the order.
        accelerator: where the batches go.
    """

    def __init__(self, rows: Dataset, batch_size: int, tokenizer: Any, seed: int, accelerator: Accelerator) -> None:
        # Imported late: transformers' trainer modules import peft too, for two seconds, before anything can be said.
        from transformers.trainer_pt_utils import LengthGroupedSampler

        self._generator = torch.Generator()
        self._seed = seed
        lengths = [len(ids) for ids in rows["input_ids"]]
        sampler = LengthGroupedSampler(batch_size, lengths=lengths, generator=self._generator)
        # With a generator of its own, a loader that starts again in the middle of an epoch draws nothing from torch's.
        loader = DataLoader(
            rows, batch_size, sampler=sampler, collate_fn=DataCollatorWithPadding(tokenizer), generator=self._generator
        )
        self._loader = loader
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


def in_order(rows: Dataset, batch_size: int, tokenizer: Any, accelerator: Accelerator) -> list[Batch]:
    """The rows as they come, for evaluation, on the accelerator's device: the same batches in every process."""
    # With a generator of its own: a loader draws a number whenever it starts, and how often a run is evaluated must
    # not change what it draws for training.
    collate = DataCollatorWithPadding(tokenizer)
    loader = DataLoader(rows, batch_size, collate_fn=collate, generator=torch.Generator())
    return [{name: tensor.to(accelerator.device) for name, tensor in batch.items()} for batch in loader]
