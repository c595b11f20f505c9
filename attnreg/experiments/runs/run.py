"""What a recipe is given: a run that can train and report."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from attnreg.experiments.runs.history import History
from attnreg.experiments.runs.loop import fit
from attnreg.experiments.runs.reporting import report
from attnreg.experiments.runs.setup import Setup
from attnreg.provider.base import MaskProvider
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import TrainingMethod


class Run(Setup):
    """One training run. The same seed gives every recipe the same head, data and order.

    Args:
        settings: the options.

    Raises:
        InputError: if something that was asked for is missing or does not fit; nothing is written then.
    """

    def train(
        self,
        method: Callable[..., TrainingMethod] = FineTuning,
        provider: MaskProvider | None = None,
        *,
        provider_lr: float | None = None,
        **options: Any,
    ) -> History:
        """Make a training method, with the run's optimizer and schedule, and train.

        Args:
            method: such as :class:`attnreg.training.FineTuning`: called with model, optimizer, provider and
                ``scheduler``, ``accelerator``.
            provider: the regularizer, if there is one.
            provider_lr: learning rate of what it learns (default: the model's).
            options: more arguments of the method.
        """
        optimizer = self.optimizer(self.model, provider, provider_lr)
        schedule = self.schedule(optimizer)
        return self.fit(
            method(self.model, optimizer, provider, scheduler=schedule, accelerator=self.accelerator, **options)
        )

    def fit(self, method: TrainingMethod) -> History:
        """Train with a method of your own making, from the last checkpoint if the run is resumed.

        Args:
            method: made with the run's :attr:`accelerator`.
        """
        return fit(method, self)

    def report(
        self, history: History, plain: tuple[Setup, History] | None = None, notes: Sequence[str] = ()
    ) -> None:
        """Print the results and write them to ``report.md``.

        Args:
            history: of this run.
            plain: plain fine-tuning to compare with.
            notes: sentences below the tables.
        """
        report(self, history, plain, notes)

    def plain(self) -> Run:
        """The same run as plain fine-tuning, in the folder ``baseline`` within this one's."""
        folder = self.folder.path / "baseline"
        # This run's own folder is new or was found to be resumable, so what is there is of the same options.
        resume = any((folder / "checkpoints").glob("step-*"))
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # stopped before its first checkpoint: nothing to continue
        return Run(replace(self.settings, output_dir=folder, resume=resume, recipe="finetune", own={}))
