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
_FEW = {"seeds": 1, "equal_time": False, "search_seeds": 1, "search_rows": 64}
_BRACES = re.compile(r"\{([^{},]*),(?:[^{}]*,)?([^{},]*)\}")


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
    shown = [_shown(name, value) for name, value in options.items()]
    if small:
        values = ", ".join(_shown(name, value) for name, value in _SMALL.items())
        notes.append(
            f"Small scale, which shows that the study runs and nothing else: one seed, {values}, and of the values in "
            "braces the first and the last."
        )
        methods = [_BRACES.sub(r"{\1,\2}", text) for text in texts_of(whole.get("methods"))]
        whole |= {**_FEW, "methods": methods or whole.get("methods")}
        options = {**_SMALL, **options}
    if shown:
        notes.append(f"Changed from the study file: {' '.join(shown)}.")
    whole |= {name: options.pop(name) for name in DESIGN if name in options}
    task, folder = options.pop("task", None), options.pop("data_dir", None)
    if task is None and folder is None and not options:
        return whole, notes
    common, entries = whole.get("options") or {}, whole.get("tasks") or [{}]
    if task is not None:
        entries = [each for each in entries if task in (each.get("task"), each.get("name"))] or [{"task": task}]
    if folder is not None:
        entries, without = _placed(entries, common.get("task", "agreement"), Path(folder))
        whole["score_on"], others = _placed(whole.get("score_on") or [], None, Path(folder))
        for names in filter(None, (without, others)):
            notes.append(f"Left out, because {folder} has no folder of that name: {', '.join(names)}.")
        if not entries:
            raise InputError(
                f"--data-dir {folder} has no folder for any task of the study ({', '.join(without)}): give a folder "
                "with one for each task, or another --task."
            )
    entries = [
        {**entry, **{name: value for name, value in options.items() if name in entry and name != "score_on"}}
        for entry in entries
    ]
    whole |= {"options": {**common, **options}, "tasks": _once(entries) if "model" in options else entries}
    if whole.get("report_on") and not all(_is_scored(whole, entry) for entry in whole["tasks"]):
        notes.append(f"The report is on dev, since there is no {whole.pop('report_on')} for all tasks.")
    return whole, notes


def _shown(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    return as_typed(f"--{flag}", value) or f"--no-{flag}"


def _is_scored(whole: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    scored = [*(whole.get("score_on") or []), *entry.get("score_on", [])]
    return whole["report_on"] in map(Scoring.usual_name, scored)


def _placed(entries: list[Any], default: str | None, root: Path) -> tuple[list[Any], list[str]]:
    """Give each task, or data to score on, its folder; return also the names of those that have none."""
    found, without = [], dict[str, None]()
    for entry in entries:
        task = entry.get("task", default)
        name = entry.get("name", task) if task == "custom" else task
        if task is None or get_task(task).embedded is not None:
            found.append(entry)
        elif place := next((root / each for each in (name, name.replace("-", "_")) if (root / each).is_dir()), None):
            named = entry if default else {**entry, "name": Scoring.usual_name(entry)}  # not by the folder that it gets
            found.append({**named, "data_dir": str(place)})
        else:
            without[name] = None
    return found, list(without)


def _once(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out entries that differ from an earlier one only in their name and figures."""
    kept: dict[str, dict[str, Any]] = {}
    for entry in entries:
        own = [pair for pair in entry.items() if pair[0] not in ("name", "published", "measured")]
        kept.setdefault(json.dumps(own, sort_keys=True), entry)
    return list(kept.values())
