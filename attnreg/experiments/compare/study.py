"""What a comparison consists of, and which of its runs can be made now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from attnreg._files import exclusive, replaced_file
from attnreg.errors import InputError, UsageError
from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.planned import PlannedRun, Role, finished
from attnreg.experiments.runs.folder import LOCK
from attnreg.experiments.runs.settings import TASK_OPTIONS

SEARCH_SEED = 1000
EQUAL_TIME_FROM = 1.1
OF_ALL = {
    *("task", *TASK_OPTIONS, "data_dir"),
    *("train_size", "validation_rows", "seed", "output_dir", "resume", "device"),
}


@dataclass(frozen=True)
class Study:
    """Methods, seeds and what all runs have in common.

    Args:
        methods: what is compared.
        baseline: the method that the others are compared with, one of them.
        options: of every run, as typed.
        seeds: number of seeds, from 0.
        folder: where everything goes.
        equal_time: also train the baseline for as long as each method that takes a tenth longer.
        search_seeds: runs for each combination of values in braces, with seeds from 1000.
        search_rows: rows held out from train that a combination is scored on.
        keep_models: keep the models of finished runs; their checkpoints are always removed.
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

    def check(self) -> None:
        """Raise if anything that was asked for is wrong, before any run is made.

        Raises:
            UsageError: if a method, or an option of one, is.
            InputError: if the folder holds runs with other options.
        """
        slugs = [method.slug for method in self.methods]
        if twice := [method.text for method in self.methods if slugs.count(method.slug) > 1]:
            raise UsageError(f"Expected each method once, got {' and '.join(map(repr, twice))}.")
        for method in self.methods:
            for variant in method.variants:
                if common := variant.command.given(variant.options) & OF_ALL:
                    option = min(common).replace("_", "-")
                    raise UsageError(f"Expected --{option} for all methods alike, got it within {variant.text!r}.")
                self._run(variant, "final", 0).settings  # noqa: B018 (refuses a wrong option)
        held = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if set(held) - {LOCK} and "study.json" not in held:
            raise InputError(
                f"Expected --output-dir to be new, empty or a comparison's, got {self.folder}: choose another folder."
            )
        for run in self.runs():
            run.check()

    def runs(self) -> list[PlannedRun]:
        """Every run that is wanted so far: what a search chooses, or a time allows, comes when that is known."""
        runs: list[PlannedRun] = []
        for method in self.methods:
            chosen = self.chosen(method)
            runs += self.search_runs(method) + ([] if chosen is None else self.final_runs(chosen))
        for longer in self.equal_time_methods().values():
            runs += self.equal_time_runs(longer)
        return list({run.folder: run for run in reversed(runs)}.values())[::-1]  # two methods may come to the same run

    def search_runs(self, method: Method) -> list[PlannedRun]:
        """The runs by which a method's values are chosen."""
        if len(method.variants) == 1:
            return []
        return [
            self._run(variant, "search", SEARCH_SEED + number)
            for variant in method.variants
            for number in range(self.search_seeds)
        ]

    def chosen(self, method: Method) -> Method | None:
        """The variant with the best mean score on held-out rows (the first of equals); ``None`` until all are run."""
        runs = self.search_runs(method)
        if not runs:
            return method.variants[0]
        if not finished(runs):
            return None
        return max(method.variants, key=lambda variant: fmean(run.score for run in runs if run.method == variant))

    def final_runs(self, method: Method) -> list[PlannedRun]:
        """The runs that are reported."""
        return [self._run(method, "final", seed) for seed in range(self.seeds)]

    def equal_time_runs(self, method: Method) -> list[PlannedRun]:
        """Runs of the baseline with more epochs."""
        return [self._run(method, "equal time", seed) for seed in range(self.seeds)]

    def equal_time_methods(self) -> dict[Method, Method]:
        """For each method that takes longer than the baseline, the baseline with as many epochs as take as long."""
        decided, baseline = self._decided(), self.chosen(self.baseline)
        if baseline is None or not self.equal_time:
            return {}
        epochs_of = {method: decided.get(self._pair(method)) for method in self.methods if method != self.baseline}
        return {method: baseline.with_option("--epochs", epochs) for method, epochs in epochs_of.items() if epochs}

    def _pair(self, method: Method) -> str:
        pair = self.chosen(method), self.chosen(self.baseline)
        return " over ".join("?" if chosen is None else chosen.text for chosen in pair)

    def decide(self) -> None:
        """When all methods are run, decide how long the baseline is trained for as long as each.

        It is decided once for each method, and written down: times are never the same twice.
        """
        chosen = {method: self.chosen(method) for method in self.methods}
        finals = {method: self.final_runs(choice) for method, choice in chosen.items() if choice is not None}
        if len(finals) < len(self.methods) or not all(map(finished, finals.values())):
            return
        decided = self._decided()
        plain = [run.result for run in finals[self.baseline]]
        epochs = int(plain[0]["config"]["epochs"])
        for method, runs in finals.items():
            if self._pair(method) not in decided and method != self.baseline:
                theirs = fmean(run.result["training_seconds"] for run in runs)
                ratio = theirs / fmean(result["training_seconds"] for result in plain)
                decided[self._pair(method)] = (
                    max(epochs + 1, round(epochs * ratio)) if ratio >= EQUAL_TIME_FROM else None
                )
        self._write(decided)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Within the block the folder is there, and this process alone works on it.

        Raises:
            InputError: if it cannot be written to, or another process works on it.
        """
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                alone = stack.enter_context(exclusive(self.folder / LOCK))
                if alone:
                    self._write(self._decided())
                    self.decide()
            except OSError as error:
                raise InputError(
                    f"Expected --output-dir to be a folder that can be written to, got: {error}."
                ) from error
            if not alone:
                raise InputError(
                    f"Expected nobody else at work on {self.folder}, but another comparison is: wait for it, or choose "
                    "another --output-dir."
                )
            yield

    def _decided(self) -> dict[str, int | None]:
        """By method, for how many epochs the baseline takes as long; ``None`` where it takes no longer."""
        path = self.folder / "study.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))["equal_time_epochs"]) if path.is_file() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"Expected a comparison's {path}, got: {error!r}.") from error

    def _write(self, decided: dict[str, int | None]) -> None:
        study = {
            "methods": [method.text for method in self.methods],
            "baseline": self.baseline.text,
            "options": list(self.options),
            "seeds": self.seeds,
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
