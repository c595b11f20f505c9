"""What is changed in the content of a study file, by options beside it or to make it small."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnreg.errors import InputError
from attnreg.experiments.compare.comparison import DESIGN
from attnreg.experiments.compare.method import texts_of
from attnreg.experiments.compare.scoring import Scoring
from attnreg.experiments.options.option import as_typed
from attnreg.experiments.tasks.built_in import get_task

_SMALL = {"train_size": 128, "validation_rows": 64, "epochs": 2, "max_length": 64, "batch_size": 16}
_FEW = {"seeds": 1, "equal_time": False, "search": {"seeds": 1, "rows": 64}}
_BRACES = re.compile(r"\{([^{},]*),(?:[^{}]*,)?([^{},]*)\}")
_LEFT = ("name", "published", "measured")


def change(content: Mapping[str, Any], typed: Mapping[str, Any], *, small: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a study file with options as typed, and sentences that say what has changed.

    ``--data-dir`` holds a folder for each task; tasks without one are left out. ``--task`` chooses among the tasks, by
    task or name, or replaces them all. With ``--model``, a task that the file has with several models is there once.
    Methods are added to those of the file.
    """
    whole, options, notes = dict(content), dict(typed), list[str]()
    if added := options.pop("methods", ()):
        notes.append(f"Added to the study: {', '.join(added)}.")
        whole["methods"] = [*texts_of(whole.get("methods")), *added]
    if small:
        values = ", ".join(as_typed(f"--{name.replace('_', '-')}", value) for name, value in _SMALL.items())
        notes.append(
            f"Small scale, which shows that the study runs and nothing else: one seed, {values}, and of the values in "
            "braces the first and the last."
        )
        whole |= {**_FEW, "methods": _with_few_values(whole.get("methods"))}
        options = {**_SMALL, **options}
    flags = {name.replace("_", "-"): value for name, value in typed.items() if name != "methods"}
    if flags:
        shown = " ".join(as_typed(f"--{flag}", value) or f"--no-{flag}" for flag, value in flags.items())
        notes.append(f"Changed from the study file: {shown}.")
    search = {name[7:]: options.pop(name) for name in DESIGN if name in options and name.startswith("search_")}
    whole |= {"search": {**(whole.get("search") or {}), **search}} if search else {}
    whole |= {name: options.pop(name) for name in DESIGN if name in options}
    task, folder = options.pop("task", None), options.pop("data_dir", None)
    if task is None and folder is None and not options:
        return whole, notes
    common = {name.replace("-", "_"): value for name, value in (whole.get("options") or {}).items()}
    entries = [{name.replace("-", "_"): value for name, value in entry.items()} for entry in whole.get("tasks") or [{}]]
    if task is not None:
        mine = [entry for entry in entries if task in (entry.get("task"), entry.get("name"))]
        entries = mine or [{"task": task}]
    if folder is not None:
        entries = _placed(entries, common, Path(folder), notes)
        whole["score_on"] = _placed(whole.get("score_on") or [], {}, Path(folder), notes, needed=False)
    entries = [{**entry, **{name: value for name, value in options.items() if name in entry}} for entry in entries]
    whole |= {"options": {**common, **options}, "tasks": _once(entries) if "model" in options else entries}
    if whole.get("report_on") and not all(_scores(whole, entry) for entry in whole["tasks"]):
        notes.append(f"The report is on dev, since there is no {whole.pop('report_on')} for all tasks.")
    return whole, notes


def _scores(whole: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    scored = [*(whole.get("score_on") or []), *entry.get("score_on", [])]
    return whole["report_on"] in map(Scoring.usual_name, scored)


def _placed(
    entries: list[Any], common: Mapping[str, Any], root: Path, notes: list[str], *, needed: bool = True
) -> list[Any]:
    """Give each task its folder; leave out and name those that have none."""
    found, without = [], list[str]()
    for entry in entries:
        task = entry.get("task", common.get("task", "agreement") if needed else None)
        name = entry.get("name", task) if task == "custom" else task
        if task is None or get_task(task).embedded is not None:
            found.append(entry)
        elif place := next((root / each for each in (name, name.replace("-", "_")) if (root / each).is_dir()), None):
            named = entry if needed else {**entry, "name": Scoring.usual_name(entry)}  # not by the folder that it gets
            found.append({**named, "data_dir": str(place)})
        else:
            without.append(name)
    if without:
        notes.append(f"Left out, because {root} has no folder of that name: {', '.join(dict.fromkeys(without))}.")
    if needed and not found:
        raise InputError(
            f"--data-dir {root} has no folder for any task of the study ({', '.join(dict.fromkeys(without))}): give "
            "a folder with one for each task, or another --task."
        )
    return found


def _once(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out entries that differ from an earlier one only in their name and figures."""
    kept: dict[str, dict[str, Any]] = {}
    for entry in entries:
        kept.setdefault(json.dumps([pair for pair in entry.items() if pair[0] not in _LEFT], sort_keys=True), entry)
    return list(kept.values())


def _with_few_values(methods: Any) -> Any:
    return [_BRACES.sub(r"{\1,\2}", text) for text in texts_of(methods)] or methods
