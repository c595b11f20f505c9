"""Read data from the Hugging Face hub, after a quick check whether it can be reached."""

from __future__ import annotations

import functools
import os
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset

TIMEOUT_S = 3.0


@functools.cache
def reachable() -> bool:
    """Whether the hub answers within three seconds; checked once per process."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True  # an error status is an answer too
    except (OSError, ValueError):
        return False


def offline_if_unreachable() -> bool:
    """Return whether the hub can be reached; if not, switch the Hugging Face libraries to their local cache.

    Without this, ``datasets`` retries for 23 seconds and ``transformers`` for 24 before they fail.
    """
    if reachable():
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    return False


def read_hub(task: Task, names: Iterable[str]) -> dict[str, Dataset]:
    """Return all splits of a task's data on the hub; ``names`` are those that must be there."""
    import datasets

    assert task.hub is not None
    online = offline_if_unreachable()
    repository, configuration = task.hub
    named = repository if configuration is None else f"{repository} ({configuration})"
    try:
        found: dict[str, Dataset] = dict(datasets.load_dataset(repository, configuration))
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        if not online:
            raise InputError(
                f"The hub cannot be reached, and {named} for task {task.name!r} is not in the local cache: use "
                "--data-dir to give a folder with train and validation as .jsonl, .csv, .tsv or .parquet."
            ) from error
        raise InputError(f"Cannot load {named} from the hub: {one_line(error)}") from error
    if missing := [name for name in names if name not in found]:
        raise InputError(f"Split {missing[0]} is missing from {named}, which has {', '.join(found)}.")
    return found
