"""From rows of text to batches of similar lengths, padded no further than each batch needs."""

from __future__ import annotations

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

    Args:
        rows: encoded rows.
        batch_size: rows in a batch; the last one may be smaller.
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
        self._loader = accelerator.prepare(loader)

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, without the first ``skip``."""
        self._generator.manual_seed(self._seed * 1_000_003 + epoch)
        for number, batch in enumerate(self._loader):
            if number >= skip:
                yield dict(batch)


def in_order(rows: Dataset, batch_size: int, tokenizer: Any, accelerator: Accelerator) -> Any:
    """A loader of the rows as they come, for evaluation."""
    return accelerator.prepare(DataLoader(rows, batch_size, collate_fn=DataCollatorWithPadding(tokenizer)))
