"""Find the files of each split in a folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from attnreg.errors import InputError
from attnreg.experiments.tasks.definition import Task

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".tsv", ".parquet")
VALIDATION = ("validation", "valid", "val", "dev")
WHOLE = ""  # the name of data that is not divided into splits
_SHOWN = 10


def suffix_of(file: Path) -> str | None:
    """Return the known suffix of a file, or ``None``.

    Example:
        >>> suffix_of(Path("train.jsonl.gz")), suffix_of(Path("train.txt"))
        ('.jsonl.gz', None)
    """
    return next((suffix for suffix in SUFFIXES if file.name.endswith(suffix)), None)


def spellings(split: str) -> tuple[str, ...]:
    """Return the names under which a split may be stored.

    Example:
        >>> spellings("validation_matched")
        ('validation_matched', 'valid_matched', 'val_matched', 'dev_matched')
        >>> spellings("test")
        ('test',)
    """
    if not split.startswith("validation"):
        return (split,)
    return tuple(word + split.removeprefix("validation") for word in VALIDATION)


def wanted_names(task: Task) -> dict[str, list[tuple[str, ...]]]:
    """Return the names to look for, by split: groups of spellings, of which the first one that is there is read."""
    primary, *further = task.validation
    splits = {} if task.evaluation_only else {"train": ["train"]}
    splits["validation"] = list(dict.fromkeys(["validation", primary]))
    splits.update({name: [name] for name in [*further, "test"]})
    return {split: [spellings(name) for name in names] for split, names in splits.items()}


def choose_names(
    wanted: Mapping[str, Iterable[Collection[str]]], found: Collection[str], folder: Path
) -> dict[str, str]:
    """Choose one of the names found for each split; a split that is not there is left out.

    Args:
        wanted: groups of spellings by split, as :func:`wanted_names` returns them.
        found: the names in the folder.
        folder: the folder, for messages.

    Raises:
        InputError: if a split is there under two spellings.

    Example:
        >>> wanted = {"train": [["train"]], "validation": [["validation", "dev"], ["test"]], "test": [["test"]]}
        >>> choose_names(wanted, ["train", "test"], Path("imdb"))
        {'train': 'train', 'validation': 'test'}
    """
    chosen: dict[str, str] = {}
    for split, groups in wanted.items():
        there = next((same for group in groups if (same := [name for name in group if name in found])), [])
        if len(there) > 1:
            raise InputError(f"{folder} has several splits for {split}, {' and '.join(there)}: keep only one of them.")
        if there and there[0] not in chosen.values():  # a test split may already be used as validation
            chosen[split] = there[0]
    return chosen


def find_files(place: Path, names: Collection[str]) -> dict[str, list[Path]]:
    """Return the data files of each split, in order.

    A split is one file, such as ``train.csv``, or several, such as ``train-00000-of-00002.parquet``. The files lie in
    the folder itself or, as on the hub, in its only subfolder that has such files (``data``, or the name of a
    configuration).

    Args:
        place: a folder, or a single file, which is returned under the name :data:`WHOLE`.
        names: names of splits to look for.

    Raises:
        InputError: if there is no such place, several subfolders have data, or a part of a split is missing.
    """
    if place.is_file():
        if suffix_of(place) is None:
            raise InputError(f"Expected --data-dir to be a folder or a {_any_suffix()} file, got {place}.")
        return {WHOLE: [place]}
    if not place.is_dir():
        raise InputError(f"Expected --data-dir to be a folder or a file, got {place}: no such folder or file.")
    if found := _files_in(place, names):
        return found
    below = {folder: files for folder in _entries(place) if folder.is_dir() and (files := _files_in(folder, names))}
    if len(below) > 1:
        some = ", ".join(folder.name for folder in below)
        raise InputError(f"{place} has data in several folders, {some}: use --data-dir to give one of them.")
    return next(iter(below.values()), {})


def one_format(split: str, files: list[Path]) -> list[Path]:
    """Return the files of a split.

    Raises:
        InputError: if they are in several formats, or one of them is the whole split.
    """
    whole = [file for file in files if "-" not in _stem(file)]
    if len(files) > 1 and (whole or len({suffix_of(file) for file in files}) > 1):
        raise InputError(
            f"{files[0].parent} has {len(files)} files for split {split}, {shown(files)}: keep one file, or parts in "
            "one format."
        )
    return files


def missing_split(split: str, found: Mapping[str, object], place: Path, hint: str = "") -> InputError:
    """Return the error for a split that is not there: what is there, and what to do.

    Args:
        split: the split.
        found: what was found, by name.
        place: the folder or file.
        hint: another way out, to end the sentence.
    """
    if WHOLE in found:
        return InputError(f"{place} has no splits: use --data-dir to give a folder with train and validation{hint}.")
    inside = _entries(place)
    if any(each.name == "dataset_dict.json" for each in inside):
        return InputError(f"No {split} split in {place}, which has {', '.join(found)}: save it too{hint}.")
    others = [f"{name}.*" for name in spellings(split)[1:]]
    also = f", also as {', '.join(others)}" if others else ""
    return InputError(
        f"No {split} file in {place}, which {'has ' + shown(inside) if inside else 'is empty'}: add "
        f"{split}.* ({_any_suffix()}{also}){hint}."
    )


def shown(files: Iterable[Path]) -> str:
    """List the names of files, folders with a slash; at most ten."""
    names = [f"{file.name}/" if file.is_dir() else file.name for file in files]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _any_suffix() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def _entries(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if not each.name.startswith("."))


def _stem(file: Path) -> str:
    return file.name.removesuffix(suffix_of(file) or "")


def _files_in(folder: Path, names: Collection[str]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in _entries(folder):
        name = _stem(file).partition("-")[0]
        if suffix_of(file) is not None and file.is_file() and name in names:
            found.setdefault(name, []).append(file)
    for files in found.values():
        _check_parts(files)
    return found


def _check_parts(files: list[Path]) -> None:
    """Raise if files are numbered as ``train-00000-of-00002`` and a number is missing."""
    numbered = [match for file in files if (match := re.search(r"-(\d+)-of-(\d+)$", _stem(file)))]
    for total in {match[2] for match in numbered}:
        there = {int(match[1]) for match in numbered if match[2] == total}
        if absent := sorted(set(range(int(total))) - there):
            number = str(absent[0]).zfill(len(total))
            raise InputError(
                f"{files[0].parent} has only {len(there)} of {int(total)} parts, {shown(files)}: part "
                f"{number}-of-{total} is missing."
            )
