"""A study file: several comparisons of the same methods, one per task, and the questions that they answer together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnreg.arguments import one_of, true_or_false, whole_number
from attnreg.errors import InputError, UsageError
from attnreg.experiments.compare.comparison import DESIGN, Comparison
from attnreg.experiments.compare.method import Method, default_baseline, texts_of
from attnreg.experiments.compare.scoring import Scoring
from attnreg.experiments.compare.yaml_file import check_switches, load_yaml, mapping
from attnreg.experiments.options.option import as_typed, flag_of
from attnreg.experiments.options.settings import OPTIONS, SHARED
from attnreg.experiments.tasks.built_in import get_task

_SEARCH = ("seeds", "rows")
_KEYS = {
    *("methods", "baseline", "tasks", "options", "search", *DESIGN.keys() - {f"search_{name}" for name in _SEARCH}),
    *("primary", "rungs", "score_on", "report_on", "output_dir", "summary", "published"),
}
_OPTIONS = {*SHARED, "validation_rows"}  # without dev, rows of train stand in for it
_SWITCHES = {option.name for option in OPTIONS if isinstance(option.default, bool)}
_OF_TASK = {"name", "score_on", "published", "measured"}  # besides options
_SCORING = {"name", "task", "data_dir", "split", "classes", "max_length"}


@dataclass(frozen=True)
class Study:
    """Comparisons of the same methods on several tasks, by name; their folders are in the output folder.

    ``primary`` names the two methods whose difference the study is about, the second subtracted from the first;
    ``score_on`` is further data to score networks on, and ``report_on`` the name of the data whose scores the report
    compares, if not dev. ``rungs`` are baselines; the other methods are also compared with the best rung on held-out
    rows. ``notes`` say what differs from the study file.

    ``published`` says which paper the figures are from; ``figures`` are by comparison, method and data (``dev``, or a
    name in ``score_on``), ``metrics`` by comparison, where the figures are not in the task's first metric.
    """

    comparisons: Mapping[str, Comparison]
    folder: Path
    primary: tuple[str, str] | None = None
    score_on: Mapping[str, Sequence[Scoring]] = field(default_factory=dict)
    report_on: str | None = None
    published: str | None = None
    figures: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    rungs: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def first(self) -> Comparison:
        """The first comparison; all have the same methods and baseline."""
        return next(iter(self.comparisons.values()))

    @property
    def other_options(self) -> str | None:
        """The options in which runs in the folder differ, if any."""
        return next(filter(None, (comparison.other_options for comparison in self.comparisons.values())), None)

    def check_methods(self) -> None:
        """Refuse methods, options and paths that do not fit."""
        for comparison in self.comparisons.values():
            comparison.check_methods()
        for comparison in self.comparisons.values():
            comparison.check_paths()
        for scoring in itertools.chain.from_iterable(self.score_on.values()):
            if scoring.data_dir is not None and not Path(scoring.data_dir).exists():
                raise InputError(f"Expected data to score {scoring.name} on in {scoring.data_dir}: there is nothing.")

    def check_folder(self) -> None:
        """Refuse a folder that holds other files or runs, and data that do not fit."""
        for comparison in self.comparisons.values():
            comparison.check_folder()
        for comparison in self.comparisons.values():
            comparison.check_data()
        for name, scorings in self.score_on.items():
            for scoring in scorings:
                scoring.check(self.comparisons[name])


def read_study(path: Path, folder: Path | None = None, changed: Mapping[str, Any] | None = None) -> Study:
    """Read a study file; the output folder is by default the file's ``output_dir``, or else ``runs/NAME``.

    ``changed`` are options as in :func:`change`.
    """
    content = load_yaml(path, f"the study {path}")
    try:
        content, notes = change(_checked(content), changed or {})
        return _study(
            content, folder or Path(str(content.get("output_dir") or f"runs/{path.stem}")).expanduser(), notes
        )
    except InputError as error:
        raise type(error)(f"In {path}: {error}") from error


def typed_study(
    typed: Sequence[str], baseline: str | None, options: Mapping[str, Any], folder: Path, design: Mapping[str, Any]
) -> Study:
    """Return the comparison of a command line as a study."""
    if not typed:
        raise UsageError("Expected METHODs to compare, or --study FILE.")
    methods = [Method.parse(text) for text in typed]
    matching = (method for method in methods if baseline in (method.name, method.text, method.typed))
    chosen = default_baseline(methods) if baseline is None else next(matching, None)
    if chosen is None:
        raise UsageError(f"Expected --baseline to be one of the methods, got {baseline!r}.")
    return Study({options["task"]: Comparison(methods, chosen, options, folder, **design)}, folder)


def _checked(content: Any) -> dict[str, Any]:
    """Check the keys of a study file; return its content, with the keys of `search` named like options."""
    study = mapping(content, "the study", _KEYS)
    tasks = _list(study, "tasks") or [{}]
    study["tasks"] = [mapping(task, f"task {number}", {*_OPTIONS, *_OF_TASK}) for number, task in enumerate(tasks, 1)]
    study["options"] = mapping(study.get("options"), "`options`", _OPTIONS)
    for options in (study["options"], *study["tasks"]):
        check_switches({name: options[name] for name in options.keys() & _OPTIONS}, _SWITCHES, "the study")
        for name in ("text_columns", "choice_columns"):  # lists of other values make several comparisons
            columns = options.get(name)
            _check(not isinstance(columns, list), name, f"names with commas, as in `{name}: a,b`", columns)
        for name in ("name", "task"):  # of tasks, a list makes several comparisons
            value = options.get(name, name)
            _check(value if name == "task" else _is_word(value) and str(value).strip("."), name, "a name", value)
    _check(_is_word(study.get("output_dir") or "runs"), "output_dir", "a folder", study.get("output_dir"))
    for entry in (study, *study["tasks"]):
        scorings = [_data(mapping(item, "`score_on`", _SCORING)) for item in _list(entry, "score_on")]
        entry |= {"score_on": scorings} if scorings else {}
    search = mapping(study.pop("search", None), "`search`", _SEARCH)
    return study | {f"search_{name}": value for name, value in search.items()}


def change(content: Mapping[str, Any], typed: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a study file with options as typed, and sentences that say what has changed.

    ``--data-dir`` holds a folder per task; tasks without a folder are left out. ``--task`` chooses among the tasks, by
    task or name, or replaces them all. Of entries that options make equal, the first stays. Methods are added to the
    methods of the file.
    """
    study, options, notes = dict(content), dict(typed), list[str]()
    if added := options.pop("methods", ()):
        notes.append(f"Added to the study: {', '.join(added)}.")
        study["methods"] = [*texts_of(study.get("methods")), *added]
    if flags := [_flag(name, value) for name, value in options.items()]:
        notes.append(f"Changed from the study file: {' '.join(flags)}.")
    study |= {name: options.pop(name) for name in DESIGN if name in options}
    task, folder = options.pop("task", None), options.pop("data_dir", None)
    if task is None and folder is None and not options:
        return study, notes
    common, entries = study.get("options") or {}, study.get("tasks") or [{}]
    if task is not None or folder is not None:
        entries = list(_of_one_task(entries, common.get("task", "agreement")))
    if task is not None:
        entries = [entry for entry in entries if task in (entry["task"], entry.get("name"))] or [{"task": task}]
    if folder is not None:
        entries, left_out = _in_folders(entries, common.get("task", "agreement"), Path(folder))
        study["score_on"], left_out_data = _in_folders(study.get("score_on") or [], None, Path(folder))
        for names in filter(None, (left_out, left_out_data)):
            notes.append(f"Left out, because {folder} has no folder of that name: {', '.join(names)}.")
        if not entries:
            raise InputError(
                f"--data-dir {folder} has no folder for any task of the study ({', '.join(left_out)}): give a folder "
                "with a folder per task, or another --task."
            )
    changed = [{**entry, **{name: value for name, value in options.items() if name in entry}} for entry in entries]
    study |= {"options": {**common, **options}, "tasks": entries if changed == entries else _once(changed)}
    everywhere, report_on = study.get("score_on") or [], study.get("report_on")
    names_by_task = [map(Scoring.usual_name, [*everywhere, *entry.get("score_on", [])]) for entry in study["tasks"]]
    if report_on and not all(report_on in names for names in names_by_task):
        notes.append(f"The report is on dev, since there is no {study.pop('report_on')} for all tasks.")
    return study, notes


def _of_one_task(entries: list[dict[str, Any]], default: Any) -> Iterator[dict[str, Any]]:
    """Yield an entry per task of a list."""
    for entry in entries:
        tasks = entry.get("task", default)
        for task in tasks if isinstance(tasks, list) else [tasks]:
            alias = {"name": f"{entry['name']}-{task}"} if isinstance(tasks, list) and "name" in entry else {}
            yield {**entry, "task": task, **alias}


def _flag(name: str, value: Any) -> str:
    return as_typed(flag_of(name), value) or f"--no-{flag_of(name)[2:]}"


def _in_folders(entries: list[Any], default: str | None, root: Path) -> tuple[list[Any], list[str]]:
    """Give the tasks, or data to score on, their folders; return also the names of tasks without a folder."""
    placed, without = [], dict[str, None]()
    for entry in entries:
        task = entry.get("task", default)
        name = entry.get("name", task) if task == "custom" else task
        if task is None or get_task(task).embedded is not None:
            placed.append(entry)
        elif folder := next(filter(Path.is_dir, (root / name, root / name.replace("-", "_"))), None):
            named = entry if default else {**entry, "name": Scoring.usual_name(entry)}  # not named by its new folder
            placed.append({**named, "data_dir": str(folder)})
        else:
            without[name] = None
    return placed, list(without)


def _once(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out entries that differ from an earlier entry only in their name and figures."""
    kept: dict[str, dict[str, Any]] = {}
    for entry in entries:
        content = [pair for pair in entry.items() if pair[0] not in ("name", "published", "measured")]
        kept.setdefault(json.dumps(content, sort_keys=True), entry)
    return list(kept.values())


def _study(content: Mapping[str, Any], folder: Path, notes: Sequence[str]) -> Study:
    texts = texts_of(content.get("methods"))
    recipes = "a mapping of names to recipes with options, as in `high: ad-drop --p 0.3`"
    _check(texts, "methods", recipes, content.get("methods"))
    methods = [Method.parse(text) for text in texts]
    by_name = {name: method for method in reversed(methods) for name in (method.text, method.name)}

    def named(key: str, name: Any) -> Method:
        return by_name[one_of(key, name, list(by_name))]

    baseline = default_baseline(methods) if content.get("baseline") is None else named("baseline", content["baseline"])
    design = {name: content[name] for name in DESIGN if name in content}
    for name, value in design.items():
        key = name.replace("search_", "search: ")
        if isinstance(DESIGN[name], bool):
            true_or_false(key, value)
        else:
            whole_number(key, value, least=0 if name == "first_seed" else 1)
    comparisons: dict[str, Comparison] = {}
    score_on: dict[str, list[Scoring]] = {}
    figures: dict[str, Any] = {}
    metrics: dict[str, str] = {}
    for number, task in enumerate(content["tasks"], 1):
        scorings = _scorings([*content.get("score_on", []), *task.get("score_on", [])])
        of_paper = mapping(task.get("published"), "`published`")
        for name, by_data in of_paper.items():
            for figure in mapping(by_data, f"`published`, {name}").values():
                _check(type(figure) in (int, float), "published", "numbers by data, as in `dev: 71.2`", figure)
        of_paper = {named("published", name).name: by_data for name, by_data in of_paper.items()}
        for name, options in _expanded(task, content["options"], f"task {number}"):
            if name in comparisons:
                raise InputError(f"Two comparisons are called {name!r}: give one of them another `name`.")
            kept = {"keep_models": bool(scorings), **design}
            comparisons[name] = Comparison(methods, baseline, options, folder / name, **kept)
            if scorings and not comparisons[name].keep_models:
                raise InputError("`score_on` needs the models: remove `keep_models: false`.")
            score_on[name] = scorings
            figures |= {name: of_paper} if of_paper else {}
            metrics |= {name: str(task["measured"])} if task.get("measured") else {}
    report_on = content.get("report_on")
    for scorings in score_on.values() if report_on is not None else ():
        names = [scoring.name for scoring in scorings]
        expected = f"a name in `score_on` of every task ({', '.join(names) or 'none'})"
        _check(report_on in names, "report_on", expected, report_on)
    primary = content.get("primary")
    if primary is not None:
        pair = [named("primary", name).name for name in primary] if isinstance(primary, list) else []
        _check(len({*pair}) == len(pair) == 2, "primary", "a list of two different methods", primary)
        primary = tuple(pair)
    rungs = [named("rungs", name) for name in _list(content, "rungs")]
    for rung in rungs:
        _check(rung.candidates, "rungs", "methods with values in braces, which held-out rows choose from", rung.name)
    names = [rung.name for rung in rungs]
    published = content.get("published")
    return Study(comparisons, folder, primary, score_on, report_on, published, figures, metrics, names, notes)


def _data(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of ``score_on``, with texts for words that YAML reads as numbers, and a task that exists."""
    given = {key: value for key, value in entry.items() if value is not None}
    words = {key: given[key] for key in ("name", "task", "data_dir") if key in given}
    for key, value in words.items():
        _check(_is_word(value), key, "a word", value)
    if "task" in words:
        get_task(str(words["task"]))
    return given | {key: str(value) for key, value in words.items()}


def _is_word(value: object) -> bool:
    """Whether a value is a text, or a number that stands for one, such as a folder that is called 2026."""
    return isinstance(value, (str, int, float))


def _check(holds: object, key: str, expected: str, value: object) -> None:
    if not holds:
        raise InputError(f"Expected `{key}` to be {expected}, got {value!r}.")


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    entries = content.get(key) or []
    _check(isinstance(entries, list), key, "a list", entries)
    return list(entries)


def _expanded(task: Mapping[str, Any], common: Mapping[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and options of the comparisons of a task; a list of values makes a comparison per value."""
    options = {"task": "agreement", **common, **{name: value for name, value in task.items() if name not in _OF_TASK}}
    lists = {name: value for name, value in options.items() if isinstance(value, list)}
    if empty := [name for name, values in lists.items() if not values]:
        raise InputError(f"Expected values for `{empty[0]}` of {where}, got an empty list.")
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        first = task.get("name", chosen.get("task", options["task"]))
        parts = [f"{key}={value}" for key, value in chosen.items() if key != "task" or "name" in task]
        yield "-".join([str(first), *parts]).replace("/", "_"), {**options, **chosen}


def _scorings(entries: Sequence[Mapping[str, Any]]) -> list[Scoring]:
    scorings = list[Scoring]()
    for entry in entries:
        split = one_of("split", entry.get("split", "validation"), ("validation", "test"))
        classes = mapping(entry.get("classes"), "`classes`")
        words = [*(entry.get("classes") or ()), *classes.values()]
        _check(not any(isinstance(word, bool) for word in words), "classes", "words, no and yes in quotes", words)
        classes = {label: str(name) for label, name in classes.items()}
        if (length := entry.get("max_length")) is not None:
            whole_number("max_length", length, least=4)
        data = entry.get("task"), entry.get("data_dir")
        scoring = Scoring(Scoring.usual_name(entry), *data, split, classes, length)
        if scoring.file in (earlier.file for earlier in scorings):
            raise InputError(f"Expected names in `score_on` that make different files, got {scoring.file} twice.")
        scorings.append(scoring)
    return scorings
