"""Read data files, folders of images, and folders that ``datasets`` has saved."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import datasets
import pyarrow
from pyarrow import parquet

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.loading.folder import VALIDATION, WHOLE, format_of, is_saved, shown, suffix_of
from attnreg.experiments.tasks.loading.text_files import columns_in


def read_saved(folder: Path) -> dict[str, datasets.Dataset] | None:
    """Read the splits of a folder written by ``save_to_disk`` of ``datasets``; ``None`` if it is another folder.

    A single data set has the name :data:`attnreg.experiments.tasks.loading.folder.WHOLE`.
    """
    if not is_saved(folder):
        return None
    try:
        saved = datasets.load_from_disk(str(folder), keep_in_memory=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"Cannot read {folder} as a saved data set: {one_line(error)}") from error
    # Rows may have been saved in the format of torch or numpy.
    if isinstance(saved, datasets.Dataset):
        return {WHOLE: saved.with_format(None)}
    return {str(name): saved[name].with_format(None) for name in saved}


def read_images(folder: Path) -> dict[str, datasets.Dataset]:
    """Read a folder of images as the hub's ``imagefolder``: a folder per split, with one per class.

    Without splits, the name is :data:`attnreg.experiments.tasks.loading.folder.WHOLE`.
    """
    if not folder.is_dir():
        raise InputError(f"Expected --data-dir to be a folder of images, got {folder}: no such folder.")
    named = any((folder / name).is_dir() for name in ("train", *VALIDATION, "test"))
    with tempfile.TemporaryDirectory() as cache:
        try:
            splits = datasets.load_dataset(
                "imagefolder", data_dir=str(folder.resolve()), cache_dir=cache, keep_in_memory=True
            )
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
            reason = one_line(error.__cause__ or error)
            raise InputError(f"Cannot read {folder} as a folder of images: {reason}") from error
    return {str(name): rows for name, rows in splits.items()} if named else {WHOLE: splits["train"]}


def read_files(files: Sequence[Path], columns: Collection[str]) -> datasets.Dataset:
    """Read files of one format as one table with these columns, or one folder that ``datasets`` has saved.

    Tables in text form stay text: files that were typed one by one would spell one label in several ways.
    """
    if (saved := read_saved(files[0])) is not None:
        if WHOLE not in saved:
            raise InputError(f"{files[0]} has splits of its own, {', '.join(saved)}: use --data-dir to give it.")
        return saved[WHOLE]
    form = format_of(files[0])
    try:
        if empty := [file for file in files if not file.stat().st_size]:
            raise InputError(f"{empty[0]} is empty: it must have rows.")
        if form == "parquet":
            return datasets.concatenate_datasets([datasets.Dataset(parquet.read_table(file)) for file in files])
        parts = [columns_in(file, columns) for file in files]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise ValueError("not all have the same columns")
        return datasets.Dataset.from_dict({name: [x for part in parts for x in part[name]] for name in parts[0]})
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError) as error:
        what = f"{files[0]} as {suffix_of(files[0])}"
        if len(files) > 1:
            what = f"{shown(files)} as one table, their columns or types differ"
        mixed = form.startswith("json") and isinstance(error, (pyarrow.ArrowException, TypeError))
        raise InputError(f"Cannot read {what}: {one_line(error)}{' (a column needs one type)' * mixed}") from error
