"""Score the model of a finished run on other data, of the same task or another one, or write its predictions."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn

from attnreg._files import check_writable, write_text
from attnreg.errors import AttnRegWarning, InputError
from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.options.files import checksum
from attnreg.experiments.options.settings import TASK_OPTIONS
from attnreg.experiments.results.document import with_predictions
from attnreg.experiments.results.evaluation import evaluate_all, predict
from attnreg.experiments.setup.batches import Labelled, to_score
from attnreg.experiments.setup.device import choose_device
from attnreg.experiments.setup.rows import input_warnings, without_text
from attnreg.experiments.tasks.built_in import choose_task
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import Kind, reading_of
from attnreg.experiments.tasks.loading.data import load_inputs, load_to_score, named_sources
from attnreg.experiments.tasks.loading.files import WHOLE
from attnreg.experiments.tasks.models.pretrained import load_pretrained, longest_input
from attnreg.experiments.tasks.task import Task


@dataclass
class SavedModel:
    """The network that a finished run returned, to use on other data.

    An option that is ``None`` is the run's: ``task`` and the other options of a task, the data if the task is the
    run's, and the maximum length.
    """

    run: Path
    options: Mapping[str, str | None]
    data_dir: str | None = None
    max_length: int | None = None
    batch_size: int = 64
    device: str | None = None

    def __post_init__(self) -> None:
        run, self._config = self.run, _config(self.run)
        self._task, of_run = _task(self._config, self.options), _task(self._config, {})
        if self._task.kind != of_run.kind:
            raise InputError(
                f"Expected a {of_run.kind} task for the model of {run}, got {self._task.name!r} ({self._task.kind})."
            )
        self._classes = _classes(run / "model") if kind_class(of_run.kind).has_classes else ()
        self._run_data = self._config.get("data_dir") if self._task.name == of_run.name else None
        self._folder = self._run_data if self.data_dir is None else self.data_dir
        if self.data_dir is None and self._folder is not None:
            self._refuse_training_rows(of_run)
            content, folder = checksum(self._folder), absolute(self._folder)
            if self._config.get("content", {}).get("data", content) != content:
                warnings.warn(f"Files in {folder} have changed since {run} was made.", AttnRegWarning, stacklevel=4)
        self._device = choose_device(self.device)

    def score(
        self, split: str = "validation", name: str | None = None, classes: Mapping[str, str] | None = None
    ) -> tuple[Path, dict[str, Any]]:
        """Score the network and write the scores to the run's ``evaluations``; return the file and its content.

        The split is ``"validation"`` (all validation sets of the task) or ``"test"``; ``name`` names the written
        file, without suffix; ``classes`` maps labels of the data to classes of the model.
        """
        place = self.run / "evaluations"
        check_writable(place if place.is_dir() else self.run, "scores are saved there; copy the run elsewhere")
        folder = self._folder
        if folder is not None and checksum(folder) == self._config.get("content", {}).get("data"):
            self._refuse_training_rows(self._task)
        # Evaluation needs no training split. The classes come from the model; integers in other data do not number
        # them, because the authors of the data do not know the order of the model's classes.
        labels, numbered = self._task.labels or self._classes, bool(self._task.labels) or self.data_dir is None
        scored_task = replace(self._task, labels=labels, numbered=numbered)
        task, splits, rows_split = load_to_score(scored_task, folder, split, classes)
        model, kind = self._load(task)
        suffix = "" if folder is None else f" of {Path(folder).name}"
        sets = {"": self._batches(kind, splits[rows_split], f"{split} inputs{suffix}")}
        for extra in task.validation[1:] if split == "validation" else ():
            if extra in splits:
                rows = self._batches(kind, splits[extra], f"{extra} inputs{suffix}")
                sets[extra.removeprefix("validation_")] = rows
        evaluation: dict[str, Any] = {"task": task.name, "split": split, "data_dir": absolute(folder)}
        options = {option: value for option, value in self.options.items() if value is not None and option != "task"}
        evaluation |= {"max_length": kind.max_length, "renamed": dict(classes or {}), "options": options}
        path = _file(place, evaluation, name, absolute(self._run_data))
        arguments = {"data_dir": self.data_dir, "split": split, "max_length": self.max_length, "classes": classes}
        result = {
            **evaluation,
            "network": RunReader(self.run).result["returned"],
            "request": request(self.options, **arguments),
            "rows": len(splits[rows_split] if kind.has_windows else sets[""].references),
            "metrics": evaluate_all(model, sets, kind),
            "classes": kind.reading and dict(zip(self._classes, (task.labels[i] for i in kind.reading), strict=True)),
        }
        place.mkdir(exist_ok=True)
        write_text(path, json.dumps(result, indent=2) + "\n")
        return path, result

    def predict(self, split: str = "test") -> list[dict[str, Any]]:
        """Return the rows, without labels, with a class name or number as ``"prediction"``."""
        task = replace(self._task, labels=self._task.labels or self._classes)
        cls = kind_class(task.kind)
        if cls.reads_images or not (cls.one_class_per_row or cls.one_number_per_row) or len(task.choices) == 1:
            form = " with all choices in one column" if task.choices else ""
            raise InputError(
                f"`attnreg predict` is for texts with one class or number per text, and {task.name} is a {task.kind} "
                f"task{form}."
            )
        rows = load_inputs(task, split, self._folder)
        model, kind = self._load(task)
        records = predict(model, self._batches(kind, rows, "inputs"), kind).records
        predictions = [record["prediction"] for record in records]
        answers = [task.labels[number] for number in predictions] if cls.has_classes else predictions
        inputs = rows.remove_columns(task.label).to_list()
        inputs = [{name: None if x != x else x for name, x in row.items()} for row in inputs]  # JSON has no NaN
        return [with_predictions(row, {"prediction": answer}) for row, answer in zip(inputs, answers, strict=True)]

    def _refuse_training_rows(self, task: Task) -> None:
        """Refuse a file that has all rows of the run, those that it was trained on, too."""
        if WHOLE in named_sources(task, self._folder)[2].values():
            other = "use --data-dir to give other rows, or `attnreg predict RUN FILE` to predict some"
            raise InputError(f"{self.run} was trained on rows of {self._folder}: {other}.")

    def _load(self, task: Task) -> tuple[nn.Module, Kind]:
        """Load the model, and the kind that encodes the rows of a task for it."""
        folder, classes = self.run / "model", self._classes
        if not RunReader(self.run).finished:
            raise _unfinished(self.run)
        reading = None if classes == task.labels else reading_of(classes, task)
        model, tokenizer, missing, _ = load_pretrained(replace(task, labels=classes), str(folder))
        if missing:
            raise InputError(f"The model in {folder} lacks weights: {', '.join(sorted(missing)[:5])}. Repeat the run.")
        length = longest_input(model, self.max_length, self._config["max_length"])
        return model.to(self._device), kind_class(task.kind)(task, tokenizer, length, reading)

    def _batches(self, kind: Kind, rows: Dataset, name: str) -> Labelled:
        """Encode rows; warn, with this name of the rows, of inputs that the model does not see in full."""
        for sentence in (*without_text(kind, name, rows), *input_warnings(kind, rows, name)):
            warnings.warn(sentence, AttnRegWarning, stacklevel=3)
        return to_score(kind.encode(rows), self.batch_size, kind, self._device)


def _unfinished(run: Path) -> InputError:
    return InputError(f"The run in {run} has not finished: continue it with --resume.")


def _config(run: Path) -> dict[str, Any]:
    if not run.is_dir():
        raise InputError(f"Run folder {run} not found.")
    if run.name == "model" and (run.parent / "config.json").is_file():
        raise InputError(f"{run} is the model of a run: give the run folder, {run.parent}.")
    config = RunReader(run).config
    if not (run / "model" / "config.json").is_file():
        if not RunReader(run).finished:
            raise _unfinished(run)
        raise InputError(f"No model in {run / 'model'}. Comparisons keep models only with --keep-models.")
    try:
        return {**config, "task": str(config["task"]), "max_length": int(config["max_length"])}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"Cannot read the run's options in {run / 'config.json'}: {error!r}.") from error


def _task(config: Mapping[str, Any], options: Mapping[str, str | None]) -> Task:
    name = options.get("task") or config["task"]
    run_options = config if name == config["task"] else {}
    return choose_task(name, **{option: options.get(option) or run_options.get(option) for option in TASK_OPTIONS})


def _classes(model: Path) -> tuple[str, ...]:
    try:
        content = json.loads((model / "config.json").read_text(encoding="utf-8"))
        names = content.get("id2label", {0: "LABEL_0", 1: "LABEL_1"})  # transformers does not write its defaults
        return tuple(str(names[number]) for number in sorted(names, key=int))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"Cannot read the class names in {model / 'config.json'}: {error!r}.") from error


def _file(folder: Path, evaluation: Mapping[str, Any], name: str | None, run_data: str | None) -> Path:
    """Choose the file of an evaluation, so that only a repetition of the same evaluation replaces it."""
    if name is not None:
        if Path(name).name != name or name in ("", ".", ".."):
            raise InputError(f"Expected --name to be a file name, got {name!r}.")
        if not _may_be_in(path := folder / f"{name}.json", evaluation):
            raise InputError(f"{path} is the evaluation of other data, or with other options: choose another name.")
        return path
    data_dir, task = evaluation["data_dir"], evaluation["task"]
    parts = ("" if data_dir in (None, run_data) else Path(data_dir).name, evaluation["split"])
    words = "-".join([task, *(part for part in parts if part not in ("", task, "validation"))])
    mark = hashlib.sha256(json.dumps(evaluation).encode()).hexdigest()[:8]  # such as of another folder of the same name
    path = folder / f"{words}.json"
    return path if _may_be_in(path, evaluation) else folder / f"{words}-{mark}.json"


def _may_be_in(path: Path, evaluation: Mapping[str, Any]) -> bool:
    """Whether a file holds the same evaluation, or does not exist."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else evaluation
        return evaluation.items() <= {"renamed": {}, "options": {}, **saved}.items()  # which earlier versions left out
    except (OSError, ValueError, TypeError):
        return False


def request(options: Mapping[str, str | None], **arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call that scores a model, for the file of the scores."""
    typed = {name: value for name, value in options.items() if value is not None}
    folder, classes = absolute(arguments["data_dir"]), dict(arguments["classes"] or {})
    content = None if folder is None else checksum(folder)
    return {"options": typed, **arguments, "data_dir": folder, "classes": classes, "content": content}


def absolute(folder: str | None) -> str | None:
    """Return the absolute path of a folder; ``None`` stays ``None``."""
    return None if folder is None else str(Path(folder).resolve())
