"""A comparison: its methods, its options, and the runs that it needs next."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from attnreg._files import exclusive, replaced_file
from attnreg.errors import InputError, UsageError
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.method import Method, values_of
from attnreg.experiments.compare.planned import PlannedRun, Role, finished
from attnreg.experiments.folder.reader import LOCK
from attnreg.experiments.options.settings import TASK_OPTIONS

SEARCH_SEED = 1000
EQUAL_TIME_FROM = 1.1
OF_ALL = {
    *("task", *TASK_OPTIONS, "data_dir"),
    *("train_size", "stratified", "shots", "folds", "validation_rows"),
    *("seed", "output_dir", "resume", "device"),
}


@dataclass(frozen=True)
class Study:
    """A comparison of methods over seeds.

    Args:
        methods: the methods.
        baseline: the method, one of ``methods``, that the others are compared with.
        options: options of every run, as typed.
        seeds: number of seeds.
        folder: the output folder.
        equal_time: also train the baseline as long as each method that takes at least 10 % longer.
        search_seeds: runs per combination of values in braces, with seeds from 1000.
        search_rows: rows held out from train to score combinations on.
        keep_models: keep the models of finished runs; checkpoints are always removed.
        first_seed: the first of the seeds.
    """

    methods: Sequence[Method]
    baseline: Method
    options: Sequence[str]
    seeds: int
    folder: Path
    equal_time: bool = True
    search_seeds: int = 1
    search_rows: int = 500
    keep_models: bool = False
    first_seed: int = 0

    def check(self) -> None:
        """Check the methods, their options and the folder, before any run starts.

        Raises:
            UsageError: if a method, or an option of a method, is wrong.
            InputError: if the folder holds other files, or runs with other options.
        """
        slugs = [method.slug for method in self.methods]
        if twice := [method.typed for method in self.methods if slugs.count(method.slug) > 1]:
            raise UsageError(f"Expected each method once, got {' and '.join(map(repr, twice))}.")
        own = [self.search_seeds for method in self.methods if len(method.variants) > 1]
        most = max([0, *own, *(method.winner.seeds for method in self.methods if method.winner is not None)])
        searched = [SEARCH_SEED, SEARCH_SEED + most - 1]
        if most and self.first_seed <= searched[1] and searched[0] < self.first_seed + self.seeds:
            raise UsageError(
                f"The seeds {self.first_seed} to {self.first_seed + self.seeds - 1} include some of the search's "
                f"({searched[0]} to {searched[1]}), so the chosen values would be tested on the runs that chose them: "
                "give another --first-seed."
            )
        for method in self.methods:
            for variant in method.variants:
                if common := variant.command.given(variant.options) & OF_ALL:
                    option = min(common).replace("_", "-")
                    raise UsageError(f"--{option} must be the same for all methods: remove it from {variant.text!r}.")
                self._run(variant, "final", 0).settings  # noqa: B018 (refuses a wrong option)
        held = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if set(held) - {LOCK} and "study.json" not in held:
            raise InputError(f"--output-dir {self.folder} holds files but no comparison: choose another folder.")
        for run in self.runs():
            run.check()

    def option(self, name: str) -> str | None:
        """Return the value of an option of all runs, if it is given.

        Args:
            name: its name, with underscores.
        """
        value = values_of(self.options).get(name)
        return None if value is None else str(value)

    def runs(self) -> list[PlannedRun]:
        """Return every run known so far. Runs that depend on a search or on measured times are added later."""
        runs: list[PlannedRun] = []
        for method in self.methods:
            chosen = self.chosen(method)
            runs += self.search_runs(method) + ([] if chosen is None else self.final_runs(chosen))
        for longer in self.equal_time_methods().values():
            runs += self.equal_time_runs(longer)
        return list({run.folder: run for run in reversed(runs)}.values())[::-1]  # two methods may come to the same run

    def set_outdated_aside(self) -> list[str]:
        """Move runs whose data, recipe or attnreg has changed to the folder ``outdated``; say what is made anew.

        Call it whenever new runs have become known.
        """
        reasons = Counter[str]()
        first = 1 + max((int(path.name) for path in (self.folder / "outdated").glob("[0-9]*")), default=0)
        for run in self.runs():
            if new := run.changed:
                reasons[" and ".join(new)] += 1
                run.set_aside(self.folder / "outdated" / str(first) / run.folder.relative_to(self.folder))
        return [
            f"Since {count} of the runs, {reason} changed: they are made anew. The old ones are in "
            f"{self.folder / 'outdated' / str(first)}."
            for reason, count in reasons.items()
        ]

    def search_runs(self, method: Method) -> list[PlannedRun]:
        """Return the runs that select a method's values."""
        if len(method.variants) == 1:
            return []
        return [
            self._run(variant, "search", SEARCH_SEED + number)
            for variant in method.variants
            for number in range(self.search_seeds)
        ]

    def chosen(self, method: Method) -> Method | None:
        """Return the variant with the best mean score on held-out rows, or ``None`` until its search has finished."""
        runs = self.search_runs(method)
        if not runs:
            return method.variants[0]
        if not finished(runs):
            return None
        means = self.search_means(method)
        return method.variants[means.index(max(means))]

    def search_means(self, method: Method) -> list[float]:
        """Return the mean score of each variant on held-out rows, once its search has finished."""
        runs = self.search_runs(method)
        return [fmean(run.score for run in runs if run.method == variant) for variant in method.variants]

    def final_runs(self, method: Method) -> list[PlannedRun]:
        """Return the runs of a method that are reported."""
        return [self._run(method, "final", seed) for seed in self._seeds]

    def equal_time_runs(self, method: Method) -> list[PlannedRun]:
        """Return the runs of a baseline with more epochs."""
        return [self._run(method, "equal time", seed) for seed in self._seeds]

    @property
    def _seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def equal_time_methods(self) -> dict[Method, Method]:
        """Map each method that takes longer than the baseline to the baseline with the same training time."""
        decided, baseline = self._decided(), self.chosen(self.baseline)
        if baseline is None or not self.equal_time:
            return {}
        epochs_of = {method: decided.get(self._pair(method)) for method in self.methods if method != self.baseline}
        return {method: baseline.with_option("--epochs", epochs) for method, epochs in epochs_of.items() if epochs}

    def _pair(self, method: Method) -> str:
        pair = self.chosen(method), self.chosen(self.baseline)
        return " over ".join("?" if chosen is None else chosen.text for chosen in pair)

    def decide(self) -> None:
        """Once all methods have run, choose the epochs for which the baseline takes as long as each of them.

        The choice is made once per method and saved, because measured times vary.
        """
        chosen = {method: self.chosen(method) for method in self.methods}
        finals = {method: self.final_runs(choice) for method, choice in chosen.items() if choice is not None}
        if len(finals) < len(self.methods) or not all(map(finished, finals.values())):
            return
        decided = self._decided()
        plain = Group(self.baseline.text, finals[self.baseline])
        if plain.results[0]["config"]["patience"] is not None:
            return  # more epochs would not make an early-stopped baseline train for longer
        epochs = int(plain.results[0]["config"]["epochs"])
        for method, runs in finals.items():
            if self._pair(method) not in decided and method != self.baseline:
                ratio = Group(method.text, runs).training_time / plain.training_time
                decided[self._pair(method)] = (
                    max(epochs + 1, round(epochs * ratio)) if ratio >= EQUAL_TIME_FROM else None
                )
        self._write(decided)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Create and lock the folder for the duration of the block.

        Raises:
            InputError: if the folder cannot be written to, or another comparison has locked it.
        """
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                alone = stack.enter_context(exclusive(self.folder / LOCK))
                if alone:
                    self._write(self._decided())
                    self.decide()
            except OSError as error:
                raise InputError(f"Cannot write to --output-dir: {error}.") from error
            if not alone:
                raise InputError(
                    f"Another comparison is writing to {self.folder}: wait for it, or choose another --output-dir."
                )
            yield

    def _decided(self) -> dict[str, int | None]:
        """Return the equal-time epochs of the baseline per method; ``None`` for a method that takes no longer."""
        path = self.folder / "study.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))["equal_time_epochs"]) if path.is_file() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"Cannot read the comparison from {path}: {error!r}.") from error

    def _write(self, decided: dict[str, int | None]) -> None:
        study = {
            "methods": [method.typed for method in self.methods],
            "baseline": self.baseline.typed,
            "options": list(self.options),
            "seeds": self.seeds,
            "first_seed": self.first_seed,
            "search_seeds": self.search_seeds,
            "search_rows": self.search_rows,
            "equal_time_epochs": decided,
        }
        with replaced_file(self.folder / "study.json") as file:
            json.dump(study, file, indent=2)

    def _run(self, method: Method, role: Role, seed: int) -> PlannedRun:
        more = ["--validation-rows", str(self.search_rows)] if role == "search" else []
        place = self.folder / "search" if role == "search" else self.folder
        folder = place / method.slug / f"seed{seed}"
        keep = self.keep_models and role != "search"
        return PlannedRun(method, role, seed, (*self.options, *more), folder, keep)
