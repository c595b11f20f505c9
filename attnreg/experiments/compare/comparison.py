"""A comparison: its methods, its options, and the runs that it needs next."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import click

from attnreg.arguments import LARGEST_WHOLE, Count, Index
from attnreg.errors import UsageError
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.method import OF_ALL, Method, typed_words
from attnreg.experiments.compare.planned import FIRST_SEED, HeldOut, PlannedRun, Role, State, Trial, best
from attnreg.experiments.folder.history import rank
from attnreg.experiments.folder.run_folder import OutputFolder
from attnreg.experiments.options.option import COMPARE, check_pairs, flag_of

EQUAL_TIME_FROM = 1.1


@dataclass(frozen=True)
class Comparison:
    """A comparison of methods over seeds; the fields with a default are options of ``attnreg compare``.

    ``baseline`` is one of ``methods``; ``options`` are shared by all runs, by name.
    """

    methods: Sequence[Method]
    baseline: Method
    options: Mapping[str, Any]
    folder: Path
    seeds: Count = 5
    first_seed: Index = 0
    equal_time: bool = True
    search_seeds: Count = 1
    search_rows: Count = 500
    keep_models: bool = False

    def check_methods(self) -> None:
        """Check the methods, their options and the seeds."""
        if self._seeds[-1] > LARGEST_WHOLE:
            raise UsageError(
                f"Expected seeds of at most {LARGEST_WHOLE}, got {self._seeds[0]} to {self._seeds[-1]}: lower "
                "--first-seed or --seeds."
            )
        slugs = [method.slug for method in self.methods]
        if repeated := [method.typed for method in self.methods if slugs.count(method.slug) > 1]:
            raise UsageError(f"Expected every method once, got {' and '.join(map(repr, repeated))}.")
        searches = [self.search_seeds for method in self.methods if method.candidates]
        most_seeds = max([0, *searches, *(method.winner.seeds for method in self.methods if method.winner is not None)])
        used_seeds = range(FIRST_SEED, FIRST_SEED + most_seeds)
        if any(seed in used_seeds for seed in self._seeds):
            raise UsageError(
                f"The seeds {self._seeds[0]} to {self._seeds[-1]} include seeds of the search ({used_seeds[0]} to "
                f"{used_seeds[-1]}), so the chosen values would be tested on the runs that chose them: give another "
                "--first-seed."
            )
        for variant in (variant for method in self.methods for variant in method.variants):
            self._check_options(variant)
        check_pairs(self.options, COMPARE, flag_of)

    def _check_options(self, variant: Method) -> None:
        """Check the options of a method, none of which may be one of the comparison."""
        try:
            if common := variant.command.typed(variant.options) & OF_ALL:
                flag = flag_of(min(common))
                raise UsageError(f"{flag} must be the same for all methods: remove it from {variant.text!r}.")
            self.final_runs(variant)[0].settings  # noqa: B018 (refuses a wrong option)
        except click.UsageError as error:  # of the recipe's command, which does not know of the comparison
            raise click.UsageError(f"In {variant.text!r}: {error.format_message()}", error.ctx) from error

    def check_paths(self) -> None:
        """Check that the data and the models of the unfinished runs exist."""
        final = (self.final_runs(variant) for method in self.methods for variant in method.variants)
        for runs in itertools.chain(map(self.search_runs, self.methods), final):
            if not all(run.finished for run in runs):
                runs[0].check_paths()

    def check_folder(self) -> None:
        """Check that the folder holds no other files, and that its runs have the options of this comparison."""
        self._output.check()
        for run in self.runs():
            run.check()

    def check_data(self) -> None:
        """Read the data of the unfinished runs, so that mistakes in them are reported before any run starts."""
        if all(run.finished for run in self.runs()):
            return
        search = [run for run in self.runs() if run.role == "search"]  # first: it needs the most rows
        for run in [*search[:1], *self.final_runs(self.baseline.variants[0])[:1]]:
            run.check_data()

    @property
    def other_options(self) -> str | None:
        """The options in which a run in the folder differs, as typed, if any."""
        differences = (run.settings.differences(run.reader.config) for run in self.runs() if run.reader.kept)
        return next((", ".join(options.values()) for options in differences if options), None)

    def runs(self) -> list[PlannedRun]:
        """Return every run known so far. Runs that depend on a search or on measured times are added later."""
        runs: list[PlannedRun] = []
        for method in self.methods:
            chosen = self.chosen(method)
            runs += self.search_runs(method) + ([] if chosen is None else self.final_runs(chosen))
        for longer in self.equal_time_methods().values():
            runs += self.final_runs(longer, "equal time")
        return list({run.folder: run for run in reversed(runs)}.values())[::-1]  # two methods may have the same run

    @property
    def _held_out(self) -> HeldOut:
        return HeldOut(self.options, self.folder, self.search_seeds, self.search_rows)

    def search_runs(self, method: Method) -> list[PlannedRun]:
        """Return the runs that select the values in braces of a method, of which those that diverged are left out.

        If all have diverged, there is no winner, and they are repeated.
        """
        trials = self.trials(method)
        kept = [trial for trial in trials if trial.state != "failed"] or trials
        return [run for trial in kept for run in self._held_out.runs(trial.method)]

    def trials(self, method: Method) -> list[Trial]:
        """Return a trial per combination of a method's values in braces; none if there are no braces."""
        trials = []
        for number, variant in enumerate(method.candidates):
            runs = self._held_out.runs(variant)
            scores = [run.score for run in runs if run.finished]
            failure = next((run.failure for run in runs if run.diverged), None)
            state: State = "failed" if failure else "complete" if len(scores) == len(runs) else "running"
            trials.append(Trial(number, variant, scores, state, failure))
        return trials

    def chosen(self, method: Method) -> Method | None:
        """Return the variant with the best mean score on held-out rows; ``None`` until its search has a winner."""
        if not (trials := self.trials(method)):
            return method.variants[0]
        winner = None if any(trial.state == "running" for trial in trials) else best(trials)
        return None if winner is None else winner.method

    def best_of(self, names: Sequence[str]) -> str | None:
        """Return the method with the best score on held-out rows; ``None`` until the searches of all have finished."""
        methods = [method for method in self.methods if method.name in names and self.chosen(method) is not None]
        winners = ((method.name, best(self.trials(method))) for method in methods)
        scores = {name: rank(winner.mean) for name, winner in winners if winner is not None}
        return max(scores, key=lambda name: scores[name]) if scores.keys() == {*names} else None

    def final_runs(self, method: Method, role: Role = "final") -> list[PlannedRun]:
        """Return the reported runs of a method, or of a baseline with more epochs."""
        folder = self.folder / method.slug
        return [
            PlannedRun(method, role, seed, self.options, folder / f"seed{seed}", self.keep_models)
            for seed in self._seeds
        ]

    def groups(self) -> dict[Method, Group]:
        """Return the finished reported runs, by method, of the methods that have any."""
        chosen = {method: self.chosen(method) for method in self.methods}
        runs_of = {method: self.final_runs(variant) for method, variant in chosen.items() if variant is not None}
        groups = {method: Group.of(method.name, runs) for method, runs in runs_of.items()}
        return {method: group for method, group in groups.items() if group.runs}

    def missing(self) -> Iterator[str]:
        """Say which runs have not finished, why, and how to go on; nothing for a complete comparison."""
        runs, groups = self.runs(), self.groups()
        done = sum(run.finished for run in runs)
        if done == len(runs):
            return
        yield (
            f"Incomplete: {done} of {len(runs)} runs have finished. Differences use the seeds that both methods have. "
            "Repeat the command to go on."
        )
        for method in self.methods:
            seeds = len(groups[method].runs) if method in groups else 0
            if seeds < self.seeds:
                yield f"{method.name}: {seeds} of {self.seeds} seeds."
        for run in runs:
            if (reason := run.failure) is not None:
                yield f"No result: {run.method.name}, {run.role}, seed {run.seed}: {reason} (see {run.log})"

    @property
    def _seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def equal_time_methods(self) -> dict[Method, Method]:
        """Map a method that takes longer than the baseline to the baseline with the same training time."""
        decided, baseline = self._decided(), self.chosen(self.baseline)
        if baseline is None or not self.equal_time:
            return {}
        epochs_of = {method: decided.get(self._pair(method)) for method in self.methods if method != self.baseline}
        return {method: baseline.with_option("--epochs", epochs) for method, epochs in epochs_of.items() if epochs}

    def _pair(self, method: Method) -> str:
        # A checksum of options and files, because removed runs may be repeated with other epochs or files.
        pair = [variant for variant in (self.chosen(method), self.chosen(self.baseline)) if variant is not None]
        settings = [self.final_runs(variant)[0].settings for variant in pair]
        content = json.dumps([[setting.to_dict(), setting.content()] for setting in settings])
        return f"{' over '.join(variant.text for variant in pair)} {zlib.crc32(content.encode()):08x}"

    def decide(self) -> None:
        """Choose, once per finished method, the number of epochs for which the baseline takes as long."""
        groups = {method: group for method, group in self.groups().items() if len(group.runs) == self.seeds}
        decided, baseline = self._decided(), groups.get(self.baseline)
        if baseline is None or baseline.config("patience") is not None:
            return  # more epochs would not make an early-stopped baseline train for longer
        epochs = int(baseline.config("epochs"))
        for method, group in groups.items():
            if self._pair(method) not in decided and method != self.baseline:
                ratio = group.training_time / baseline.training_time
                longer = max(epochs + 1, round(epochs * ratio))
                decided[self._pair(method)] = longer if ratio >= EQUAL_TIME_FROM else None
        self._write(decided)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Create and lock the folder for the duration of the block."""
        with self._output.locked():
            self._write(self._decided())
            self.decide()
            yield

    @property
    def _output(self) -> OutputFolder:
        return OutputFolder(self.folder, "comparison", "study.json")

    def _decided(self) -> dict[str, int | None]:
        """Return the equal-time epochs of the baseline per method; ``None`` for a method that takes no longer."""
        return dict(self._output.read().get("equal_time_epochs", {}))

    def _write(self, decided: dict[str, int | None]) -> None:
        methods, options = [method.typed for method in self.methods], typed_words(self.options)
        content = {"methods": methods, "baseline": self.baseline.typed, "options": options}
        design = {name: getattr(self, name) for name in DESIGN}
        self._output.write({**content, **design, "equal_time_epochs": decided})


DESIGN = {attribute.name: attribute.default for attribute in fields(Comparison) if attribute.default is not MISSING}
