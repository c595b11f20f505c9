"""A study file: several comparisons of the same methods, one per task, and what is asked of them together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from attnreg.errors import InputError, did_you_mean
from attnreg.experiments.compare.change import change
from attnreg.experiments.compare.comparison import DESIGN, Comparison
from attnreg.experiments.compare.method import Method, common_options, default_baseline, texts_of, values_of
from attnreg.experiments.compare.scoring import Scoring
from attnreg.experiments.options.settings import SHARED

_KEYS = {
    *("methods", "baseline", "tasks", "options", "search", *DESIGN.keys() - {"search_seeds", "search_rows"}),
    *("primary", "rungs", "equivalence", "score_on", "report_on", "output_dir", "summary", "published"),
}
_OPTIONS = {*SHARED, "validation_rows"}  # without dev, rows of train stand in for it
_SCORING = {"name", "task", "data_dir", "split", "classes", "max_length"}


@dataclass(frozen=True)
class Published:
    """Figures of a paper, to set beside the measured ones: where they are from, and those of each comparison.

    ``figures`` are by comparison, method and the data that they are of (``dev``, or a name in ``score_on``), and
    ``metrics`` by comparison, where they are of another metric than the task's first.
    """

    source: str
    figures: Mapping[str, Mapping[str, Mapping[str, float]]]
    metrics: Mapping[str, str]


@dataclass(frozen=True)
class Study:
    """Comparisons of the same methods on several tasks, by name; the output folder has a folder for each of them.

    ``primary`` names the two methods whose difference the study is about, the second subtracted from the first;
    differences below ``equivalence`` count as equal in practice; ``score_on`` is what networks are also scored on, and
    ``report_on`` the name of the one that the report compares scores on, if not on dev. ``rungs`` are baselines; the
    best of them on held-out rows is what the other methods are also compared with. ``notes`` say what differs from the
    study file.
    """

    comparisons: Mapping[str, Comparison]
    folder: Path
    primary: tuple[str, str] | None = None
    equivalence: float | None = None
    score_on: Mapping[str, Sequence[Scoring]] = field(default_factory=dict)
    report_on: str | None = None
    published: Published | None = None
    rungs: Sequence[str] = ()
    notes: Sequence[str] = ()


def read_study(
    path: Path, folder: Path | None = None, changed: Mapping[str, Any] | None = None, *, small: bool = False
) -> Study:
    """Read a study file; the output folder is by default the file's ``output_dir``, or else ``runs/NAME`` after it.

    ``changed`` holds options as typed, which replace those of the file; ``small`` makes it small before. See
    :mod:`attnreg.experiments.compare.change`.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"Cannot read the study {path}: {' '.join(str(error).split())}") from error
    whole = _mapping(content, _KEYS, f"the study {path}")
    for name, kind, expected in (("tasks", list, "a list"), ("options", dict, "a mapping of names to values")):
        _check(isinstance(whole.get(name) or kind(), kind), name, path, expected, whole.get(name))
    for number, task in enumerate(whole.get("tasks") or [], 1):
        _mapping(task, None, f"task {number} in {path}")
    whole, notes = change(whole, dict(changed or {}), small=small)
    methods = _methods(whole.get("methods"), path)
    named = whole.get("baseline")
    baseline = default_baseline(methods) if named is None else _named(named, methods, "baseline", path)
    search = _mapping(whole.get("search", {}), {"seeds", "rows"}, f"`search` in {path}")
    design = {name: whole[name] for name in DESIGN if name in whole} | {f"search_{k}": v for k, v in search.items()}
    for name, value in design.items():
        key = name.replace("search_", "search: ")
        if isinstance(DESIGN[name], bool):
            _check(isinstance(value, bool), key, path, "true or false", value)
        else:
            _number(value, key, path, least=0 if name == "first_seed" else 1)
    place = folder or Path(whole.get("output_dir") or Path("runs") / (f"{path.stem}-small" if small else path.stem))
    common = _options(whole.get("options", {}), f"`options` in {path}")
    tasks = whole.get("tasks") or [{}]
    shared_scores = _scorings(whole.get("score_on", []), path)
    comparisons: dict[str, Comparison] = {}
    score_on: dict[str, list[Scoring]] = {}
    figures: dict[str, Any] = {}
    metrics: dict[str, str] = {}
    for number, task in enumerate(tasks, 1):
        where = f"task {number} in {path}"
        given = _mapping(task, {*_OPTIONS, "name", "score_on", "published", "measured"}, where)
        entry = {key.replace("-", "_"): value for key, value in given.items()}
        scorings = [*shared_scores, *_scorings(entry.pop("score_on", []), path)]
        published, measured = entry.pop("published", {}), entry.pop("measured", None)
        for name in _mapping(published, None, f"`published` of {where}"):
            _named(name, methods, "published", path)
        for name, options in _expanded(entry, common, where):
            if name in comparisons:
                raise InputError(f"Two comparisons in {path} are called {name!r}: give one of them another `name`.")
            comparisons[name] = Comparison(
                methods=methods,
                baseline=baseline,
                options=common_options(options),
                folder=place / name,
                **{"keep_models": bool(scorings), **design},
            )
            score_on[name] = scorings
            figures |= {name: published} if published else {}
            metrics |= {name: str(measured)} if measured else {}
    if any(score_on[name] and not comparison.keep_models for name, comparison in comparisons.items()):
        raise InputError(f"`score_on` in {path} needs the models: remove `keep_models: false`.")
    region = whole.get("equivalence")
    number = isinstance(region, (int, float)) and not isinstance(region, bool)
    _check(region is None or (number and region > 0), "equivalence", path, "a number above 0", region)
    report_on = whole.get("report_on")
    for scorings in score_on.values():
        names = [scoring.name for scoring in scorings]
        known = f"a name in `score_on` of each task ({', '.join(names) or 'none'})"
        _check(report_on is None or report_on in names, "report_on", path, known, report_on)
    source = whole.get("published")
    paper = None if source is None else Published(str(source), figures, metrics)
    primary = _contrast(whole.get("primary"), methods, path)
    rungs = whole.get("rungs", [])
    _check(isinstance(rungs, list), "rungs", path, "a list of methods", rungs)
    chosen = [_named(name, methods, "rungs", path) for name in rungs]
    for method in chosen:
        tries = len(method.variants)
        _check(tries > 1, "rungs", path, "methods with values in braces, which held-out rows choose from", method.name)
    names = [method.name for method in chosen]
    return Study(comparisons, place, primary, region, score_on, report_on, paper, names, notes)


def written(comparison: Comparison) -> str:
    """Return the study file of a comparison that was given on the command line."""
    options = values_of(comparison.options)
    content = {
        "methods": {method.name: method.text for method in comparison.methods},
        "baseline": comparison.baseline.name,
        "tasks": [{name: options.pop(name) for name in ("task", "data_dir", "model", "train_size") if name in options}],
        "options": options,
        **{name: value for name, value in comparison.design.items() if not name.startswith("search_")},
        "search": {"seeds": comparison.search_seeds, "rows": comparison.search_rows},
    }
    return yaml.safe_dump({name: value for name, value in content.items() if value != {}}, sort_keys=False)


def _methods(content: Any, path: Path) -> list[Method]:
    if texts := texts_of(content):
        return [Method.parse(text) for text in texts]
    raise InputError(
        f"Expected `methods` in {path} to map names to recipes with options, as in `high: ad-drop --p 0.3`, got "
        f"{content!r}."
    )


def _named(name: Any, methods: Sequence[Method], key: str, path: Path) -> Method:
    found = [method for method in methods if name in (method.name, method.text)]
    _check(found, key, path, f"one of the methods, {', '.join(method.name for method in methods)}", name)
    return found[0]


def _contrast(content: Any, methods: Sequence[Method], path: Path) -> tuple[str, str] | None:
    if content is None:
        return None
    _check(isinstance(content, list) and len(content) == 2, "primary", path, "a list of two methods", content)
    first, second = (_named(name, methods, "primary", path).name for name in content)
    return first, second


def _options(content: Any, where: str) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in _mapping(content, _OPTIONS, where).items()}


def _expanded(entry: dict[str, Any], common: Mapping[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the options of each comparison of a task; a list of values makes one for each of them."""
    options = {"task": "agreement", **common, **{k: v for k, v in entry.items() if k != "name"}}
    lists = {name: value for name, value in options.items() if isinstance(value, list)}
    if empty := [name for name, values in lists.items() if not values]:
        raise InputError(f"Expected values for `{empty[0]}` of {where}, got an empty list.")
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        name = "-".join([str(entry.get("name", options["task"])), *(f"{key}={value}" for key, value in chosen.items())])
        yield name.replace("/", "_"), {**options, **chosen}


def _scorings(content: Any, path: Path) -> list[Scoring]:
    _check(isinstance(content, list), "score_on", path, "a list", content)
    made = []
    for each in content:
        given = _mapping(each, _SCORING, f"`score_on` in {path}")
        entry = {key.replace("-", "_"): value for key, value in given.items()}
        split = entry.get("split", "validation")
        _check(split in ("validation", "test"), "split", path, "validation or test", split)
        pairs = _mapping(entry.get("classes", {}), None, f"`classes` in {path}")
        classes = {str(theirs): str(ours) for theirs, ours in pairs.items()}
        if (length := entry.get("max_length")) is not None:
            _number(length, "max_length", path, least=4)
        made.append(
            Scoring(Scoring.usual_name(entry), entry.get("task"), entry.get("data_dir"), split, classes, length)
        )
    names = [scoring.name for scoring in made]
    if len(set(names)) < len(names):
        raise InputError(f"Expected different names in `score_on` of {path}, got {', '.join(names)}.")
    return made


def _mapping(content: Any, known: set[str] | None, where: str) -> dict[Any, Any]:
    if not isinstance(content, dict):
        raise InputError(f"Expected {where} to map names to values, got {content!r}.")
    for key in content:
        if known is not None and str(key).replace("-", "_") not in known:
            raise InputError(f"Unknown key {key!r} in {where}.{did_you_mean(str(key), known)}")
    return dict(content)


def _number(value: Any, key: str, path: Path, least: int) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _check(whole and value >= least, key, path, f"a whole number of at least {least}", value)
    return int(value)


def _check(right: object, key: str, path: Path, expected: str, value: object) -> None:
    if not right:
        raise InputError(f"Expected `{key}` in {path} to be {expected}, got {value!r}.")
