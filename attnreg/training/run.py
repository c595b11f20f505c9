"""One training run: its task, data, model, seed and folder."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from attnreg.errors import InputError
from attnreg.tasks.data import load_splits
from attnreg.tasks.model import load_model
from attnreg.tasks.task import get_task
from attnreg.training.batches import TrainBatches, encode, in_order
from attnreg.training.folder import RunFolder
from attnreg.training.method import Batch
from attnreg.training.optim import adamw
from attnreg.training.settings import Settings

WARMUP_SHARE = 0.1


class Run:
    """Everything that a recipe needs around its method. The same seed gives the same head, data and order to all.

    Args:
        settings: the options.

    Raises:
        InputError: if something that was asked for is not there or does not fit; nothing is written then.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.task = get_task(settings.task)
        self.folder = RunFolder(settings.output_dir)
        self.folder.check(settings)
        splits = load_splits(self.task, settings.data_dir)
        if settings.device not in (None, "cpu") and not getattr(torch, settings.device).is_available():
            raise InputError(f"Expected --device to be a device of this machine, got {settings.device}: none is there.")
        self.accelerator = Accelerator(cpu=settings.device == "cpu")
        set_seed(settings.seed)
        self.model, self.tokenizer = load_model(self.task, settings.model)
        limit = getattr(self.model.config, "max_position_embeddings", settings.max_length)
        if settings.max_length > limit:
            raise InputError(f"Expected --max-length of at most {limit} for this model, got {settings.max_length}.")
        train = splits["train"].shuffle(seed=settings.seed)
        if settings.train_size is not None:
            if settings.train_size > len(train):
                raise InputError(f"Expected --train-size of at most {len(train)}, got {settings.train_size}.")
            train = train.select(range(settings.train_size))
        self._encode = functools.partial(encode, self.task, tokenizer=self.tokenizer, max_length=settings.max_length)
        self.train_rows = self._encode(rows=train)
        self.dev_rows = self._encode(rows=splits["validation"])
        if not settings.resume:
            self.folder.create(settings)

    @property
    def epochs(self) -> int:
        """Number of epochs."""
        return self.settings.epochs

    @functools.cached_property
    def train_batches(self) -> TrainBatches:
        """The training batches; what is held out must be held out before."""
        return TrainBatches(
            self.train_rows, self.settings.batch_size, self.tokenizer, self.settings.seed, self.accelerator
        )

    @functools.cached_property
    def dev_batches(self) -> Any:
        """The validation split, in order."""
        return in_order(self.dev_rows, self.settings.batch_size * 2, self.tokenizer, self.accelerator)

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps in the whole run."""
        return len(self.train_batches) * self.epochs

    def hold_out(self, size: int) -> list[Batch]:
        """Take rows away from the training data (the last of the seed's shuffle) and give them as batches.

        Raises:
            InputError: if that leaves no row to train on.
        """
        left = len(self.train_rows) - size
        if left < 1:
            raise InputError(f"Expected fewer than {len(self.train_rows)} rows to hold out, got {size}.")
        held = self.train_rows.select(range(left, left + size))
        self.train_rows = self.train_rows.select(range(left))
        return self._batches(held)

    def dev_as_batches(self) -> list[Batch]:
        """The validation split as a list of batches."""
        return self._batches(self.dev_rows)

    def _batches(self, rows: Any) -> list[Batch]:
        batches = in_order(rows, self.settings.batch_size * 2, self.tokenizer, self.accelerator)
        return [dict(batch) for batch in batches]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW with the run's learning rate."""
        return adamw(model, self.settings.learning_rate)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Linear warm-up over a tenth of the steps, then linear decay to zero."""
        from transformers import get_linear_schedule_with_warmup  # late: it is slow to import

        return get_linear_schedule_with_warmup(optimizer, int(WARMUP_SHARE * self.total_steps), self.total_steps)

    def plain(self) -> Run:
        """The same run as plain fine-tuning, in the folder ``baseline`` within this one's."""
        folder = self.folder.path / "baseline"
        resume = self.settings.resume and (folder / "checkpoints").is_dir()
        if self.settings.resume and not resume:
            shutil.rmtree(folder, ignore_errors=True)  # stopped before its first checkpoint: nothing to go on from
        return Run(replace(self.settings, recipe="finetune", own={}, output_dir=folder, resume=resume))
