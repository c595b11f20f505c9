"""The run that a recipe receives: it can train and report."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from attnreg.errors import AttnRegWarning, InputError, UsageError
from attnreg.experiments.folder.history import History
from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.results.document import (
    Block,
    Code,
    Heading,
    Paragraph,
    Picture,
    Table,
    markdown,
    print_table,
    say,
)
from attnreg.experiments.results.outcome import notes_of, tables_of
from attnreg.experiments.runs.loop import fit
from attnreg.experiments.setup.setup import Setup
from attnreg.experiments.tasks.models.linear_head import fit_linear_head
from attnreg.regularizer.base import Regularizer
from attnreg.training.averaged import Averaged
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import TrainingMethod


class Run(Setup):
    """A run that can train and report. See :class:`attnreg.experiments.setup.setup.Setup` for arguments and errors."""

    def train(
        self,
        method: Callable[..., TrainingMethod] = FineTuning,
        provider: Regularizer | None = None,
        *,
        provider_lr: float | None = None,
        **options: Any,
    ) -> History:
        """Make a training method with the run's optimizer and schedule, and train.

        Args:
            method: a class such as :class:`attnreg.training.FineTuning`, called with model, optimizer, provider,
                ``scheduler`` and ``accelerator``; with ``--class-weights``, ``--label-smoothing`` or
                ``--prompt-weight`` also ``loss_function``, with ``--gradient-accumulation`` also ``micro_batches``, and
                with ``--max-grad-norm`` also ``max_grad_norm``.
            provider: the mask provider, if any.
            provider_lr: learning rate of the provider's parameters (default: the model's).
            options: further arguments of the method, such as ``loss_function``.

        Raises:
            UsageError: if such an option would replace the recipe's ``loss_function``.
            InputError: if the method does not take one of the ``options``.
        """
        if self.loss_function is not None and options.get("loss_function") is not None:
            raise UsageError(
                f"Recipe {self.settings.recipe} has its own loss, without {self.loss_flags}: remove the option."
            )
        options |= self.method_options
        if self.settings.linear_probe and self.seconds_before is None:
            self.fit_head()
        optimizer = self.optimizer(self.model, provider, provider_lr)
        required = {"scheduler": self.schedule(optimizer), "accelerator": self.accelerator}
        try:
            training_method = method(self.model, optimizer, provider, **required, **options)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            flag = next((f" ({flag})" for name, flag in self.method_flags.items() if f"'{name}'" in str(error)), "")
            raise InputError(f"Cannot make {method.__name__} for {self.settings.recipe}: {error}{flag}.") from error
        return self.fit(training_method)

    def fit_head(self) -> float:
        """Fit the linear head on frozen features, in time that counts as training; return the chosen penalty."""
        clock, cpu = time.perf_counter(), time.process_time()
        strength = fit_linear_head(self.model.to(self.accelerator.device), self.rows_in_order(self.train_rows))
        self.seconds_before = time.perf_counter() - clock, time.process_time() - cpu
        return strength

    def fit(self, method: TrainingMethod) -> History:
        """Train with a method of yours; a resumed run continues from its last checkpoint.

        Args:
            method: a training method with the run's :attr:`accelerator`. With ``--select best``, its model has its
                best weights afterwards; with ``--ema`` or ``--wise-ft``, the averaged ones.

        Raises:
            InputError: if the method lacks the run's accelerator, unless the run uses one process on a CPU
                in float32; or without one of the options that :meth:`train` gives a method.
            StoppedError: if training diverges, a file cannot be written, or a signal stops the run.

        Warns:
            AsleepWarning: if the provider is never active within the run's epochs.
        """
        if self.settings.linear_probe and self.seconds_before is None:
            raise UsageError(f"--linear-probe is not for {self.settings.recipe}, which makes its networks: remove it.")
        if not self.settings.ema and self.settings.wise_ft == 1.0:
            return fit(method, self)
        averaged = Averaged(method, ema=self.settings.ema, wise=self.settings.wise_ft)
        history = fit(averaged, self)
        method.model.load_state_dict(averaged.model.state_dict())
        return history

    def report(
        self,
        history: History,
        plain: tuple[Setup, History] | None = None,
        notes: Sequence[str] = (),
        tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
    ) -> None:
        """Print the results and write them to ``report.md``.

        Args:
            history: history of this run.
            plain: a plain fine-tuning run to compare with, and its history.
            notes: sentences to add below the tables.
            tables: further tables by title; the first row is the header.
        """
        further = {heading: Table(header, rows) for heading, (header, *rows) in (tables or {}).items()}
        sentences = [*notes, *notes_of(self, history, plain)]
        console, blocks = Console(quiet=not self.folder.writer), list[Block]()
        for heading, table in {**tables_of(self, history, plain), **further}.items():
            print_table(console, table, title=heading)
            blocks += [Paragraph(f"{' '.join(heading.split())}:") if blocks else Heading(heading), table]
        with self.folder.written():
            pictures = self.pictures()
            plots = f", pictures to {self.folder.path}/plots: {', '.join(picture.path.name for picture in pictures)}"
            say(console, *sentences, f"Results saved to {self.folder.path}/{plots if pictures else ''}.")
            blocks += [*map(Paragraph, sentences), *pictures, Code(self.settings.command())]  # which repeats the run
            self.folder.write_text("report.md", markdown(blocks, self.folder.path))
        if not self.settings.keep_checkpoints:
            for run in (self, *(() if plain is None else plain[:1])):
                run.folder.remove_checkpoints()

    def pictures(self) -> list[Picture]:
        """Draw the plots of the run, unless --no-plots turns them off."""
        if self.settings.no_plots or not self.folder.writer:
            return []
        from attnreg.experiments.results.plots.run import CAPTIONS, plot_run  # late: they are slow to import

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttnRegWarning)  # the run has shown them
            paths, _ = plot_run(self.folder.path)
        return [Picture(path, CAPTIONS[path.stem]) for path in paths]

    def plain(self) -> Run:
        """Return a plain fine-tuning run with the same settings, with the folder ``baseline`` in this run's folder."""
        folder = self.folder.path / "baseline"
        # This run's folder is new or was checked before resuming, so a baseline in it has the same options.
        resume = RunReader(folder).resumable
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # stopped before its first checkpoint: nothing to continue
        plain = Run(replace(self.settings, output_dir=folder, resume=resume, recipe="finetune", own={}))
        plain.remarks.clear()  # this run has shown them
        return plain
