"""Data files: the files of a folder that belong to a split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from attnreg.errors import InputError, listed
from attnreg.experiments.tasks.task import Task

_TEXTS, _PACKED = (".jsonl", ".json", ".csv", ".tsv"), ("", ".gz", ".bz2", ".zst")
_ANY = f"{', '.join(_TEXTS)} or .parquet"
SUFFIXES = (*(text + packed for text in _TEXTS for packed in _PACKED), ".parquet")
VALIDATION = ("validation", "valid", "val", "dev")
PREDICTED = ".predicted"  # in the names of files with predictions, which are saved beside data
WHOLE = ""  # the name of data that is not divided into splits
_SHOWN = 10
_PART = re.compile(r"-.*$|[_.]?\d+$")  # train-00000-of-00002, train-a, train_1, train2


def is_data(name: str) -> bool:
    """Whether a name may be that of a file or folder of data: not if it is hidden, a README or predictions of ours."""
    return not name.startswith(".") and not name.endswith((".md", f"{PREDICTED}.csv", f"{PREDICTED}.jsonl"))


def suffix_of(file: Path) -> str | None:
    """Return the known suffix of a file, such as ``.jsonl.gz``, or ``None``."""
    return next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), None)


def format_of(file: Path) -> str:
    """Return the format of a data file, packed or not, such as ``jsonl``."""
    return str(suffix_of(file)).split(".")[1]


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by ``save_to_disk`` of ``datasets``."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def spellings(split: str) -> tuple[str, ...]:
    """Return the names that a split may have: those of ``validation_matched`` include ``dev_matched``."""
    if not split.startswith("validation"):
        return (split,)
    return tuple(word + split.removeprefix("validation") for word in VALIDATION)


def wanted_names(task: Task) -> dict[str, list[tuple[str, ...]]]:
    """Return the names to look for, by split: groups of spellings, of which the first one that exists is read."""
    primary, *further = task.validation
    splits = {} if task.evaluation_only else {"train": ["train"]}
    splits["validation"] = list(dict.fromkeys(["validation", primary]))
    splits.update({name: [name] for name in [*further, "test"]})
    return {split: [spellings(name) for name in names] for split, names in splits.items()}


def names_of(task: Task) -> set[str]:
    """Return all names to look for."""
    return {name for groups in wanted_names(task).values() for group in groups for name in group}


def choose_names(
    wanted: Mapping[str, Iterable[Collection[str]]], names: Collection[str], where: Path | str
) -> dict[str, str]:
    """Choose the name of a split, or raise if a split has two; a split without a name is left out."""
    chosen: dict[str, str] = {}
    for split, groups in wanted.items():
        matches = next(filter(None, ([name for name in group if name in names] for group in groups)), [])
        if len(matches) > 1:
            raise InputError(f"{where} has several splits for {split}, {' and '.join(matches)}: keep only one of them.")
        if matches and matches[0] not in chosen.values():  # a test split may already be used as validation
            chosen[split] = matches[0]
    return chosen


def folder_with_data(path: Path, names: Collection[str]) -> Path:
    """Return a folder itself or, as on the hub, its only subfolder that has data (``data``, or a configuration).

    A single file is returned unchanged.
    """
    if path.is_file():
        if suffix_of(path) is None:
            raise InputError(f"Expected --data-dir to be a folder or a {_ANY} file, got {path}.")
        return path
    if not path.is_dir():
        reason = "no such folder or file"
        if path.exists():  # such as a pipe of `<(cat rows.csv)`, which has no suffix and is read only once
            reason = "it is neither; save its content as a file, such as rows.csv"
        raise InputError(f"Expected --data-dir to be a folder or a file, got {path}: {reason}.")
    if is_saved(path) or find_files(path, names):
        return path
    folders = [entry for entry in _entries(path) if entry.is_dir() and (is_saved(entry) or find_files(entry, names))]
    if len(folders) > 1:
        several = ", ".join(folder.name for folder in folders)
        raise InputError(f"{path} has data in several folders, {several}: use --data-dir to give one of them.")
    return folders[0] if folders else path


def find_files(path: Path, names: Collection[str]) -> dict[str, list[Path]]:
    """Return the files or folders of splits, in order; :func:`parts_of` looks into folders.

    A split is one file, such as ``train.csv``, several, such as ``train-00000-of-00002.parquet``, or a folder, such as
    that of ``train/0000.parquet``. If ``path`` itself is a file, it is returned under the name :data:`WHOLE`.
    """
    if path.is_file():
        return {WHOLE: [path]}
    splits: dict[str, list[Path]] = {}
    for entry in _entries(path):
        name = entry.name.lower() if entry.is_dir() else _PART.sub("", stem_of(entry).lower())
        if name in names and _has_data(entry):
            splits.setdefault(name, []).append(entry)
    return splits


def parts_of(name: str, parts: list[Path]) -> list[Path]:
    """Return the files of a split, or the folder in which ``datasets`` has saved it, or raise if they do not fit.

    ``name`` and ``parts`` are those of :func:`find_files`.
    """
    where, files = parts[0].parent, parts
    if len(parts) == 1 and parts[0].is_dir():
        if is_saved(parts[0]):
            return parts
        where, files = parts[0], [entry for entry in _entries(parts[0]) if entry.is_file() and suffix_of(entry)]
    several = len(parts) > 1 and any(part.is_dir() or stem_of(part).lower() == name for part in parts)
    if several or len({suffix_of(file) for file in files}) > 1:
        raise InputError(f"{where} has split {name} several times, {shown(files)}: keep one, or parts of one format.")
    numbered = [match for file in files if (match := re.search(r"-(\d+)-of-(\d+)$", stem_of(file).lower()))]
    for total in {match[2] for match in numbered}:
        present = {int(match[1]) for match in numbered if match[2] == total}
        if absent := sorted(set(range(int(total))) - present):
            number = f"{str(absent[0]).zfill(len(total))}-of-{total}"
            rest = f"only {len(present)} of {int(total)} parts, {shown(files)}"
            raise InputError(f"{where} has {rest}: part {number} is missing.")
    return files


def not_on_hub(task: Task) -> InputError:
    """Return the error for a task that needs a folder of data."""
    return InputError(f"Task {task.name!r} is not on the hub: use --data-dir to give a folder with its files.")


def missing_split(split: str, sources: Mapping[str, object], path: Path | str, hint: str = "") -> InputError:
    """Return the error for a missing split, with the splits that exist and advice; ``hint`` is more advice."""
    if WHOLE in sources:
        return InputError(f"{path} has no splits: use --data-dir to give a folder with train and validation{hint}.")
    if isinstance(path, str) or (path / "dataset_dict.json").exists():
        advice = "use --data-dir to give a folder that has it"
        return InputError(f"No {split} split in {path}, which has {', '.join(sources)}: {advice}{hint}.")
    files = shown(_entries(path)) or "no files"
    others = [f"{name}.*" for name in spellings(split)[1:]]
    advice = f"add {split}.* ({_ANY}{', also as ' * bool(others)}{', '.join(others)})"
    return InputError(f"No {split} file in {path}, which has {files}: {advice}{hint}.")


def shown(files: Iterable[Path]) -> str:
    """List the names of files, folders with a slash; at most ten."""
    return listed([f"{file.name}/" if file.is_dir() else file.name for file in files], _SHOWN)


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_data(path.name))


def named(path: Path) -> Path:
    """Return a path that ends with a name: that of ``.`` or ``..`` in full."""
    return path if path.name.strip(".") else path.resolve()


def stem_of(file: Path) -> str:
    """Return the name of a file without its known suffix."""
    return file.name[: len(file.name) - len(suffix_of(file) or "")]


def _has_data(entry: Path) -> bool:
    if not entry.is_dir():
        return suffix_of(entry) is not None
    return is_saved(entry) or any(suffix_of(file) and file.is_file() for file in _entries(entry))
