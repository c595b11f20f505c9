"""Read data from the Hugging Face hub, after a quick check whether it can be reached."""

from __future__ import annotations

import functools
import os
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset

TIMEOUT_S = 3.0


@functools.cache
def offline_if_unreachable() -> bool:
    """Return whether the hub answers in time; if not, switch the Hugging Face libraries to their local cache.

    It is asked once per process. Without this, ``datasets`` retries for 23 seconds and ``transformers`` for 24 before
    they fail.
    """
    import datasets
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        try:
            with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=TIMEOUT_S):
                return True
        except urllib.error.HTTPError:
            return True  # an error status is an answer too
        except (OSError, ValueError):
            pass
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False


def read_hub(task: Task) -> tuple[str, dict[str, Dataset]]:
    """Return the name of a task's data on the hub, and all of its splits."""
    import datasets

    if task.hub is None:
        raise InputError(f"Task {task.name!r} is not on the hub: use --data-dir to give a folder with its files.")
    online = offline_if_unreachable()
    named = "{} ({})".format(*task.hub) if task.hub[1] else task.hub[0]
    try:
        return named, dict(datasets.load_dataset(*task.hub))
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        if not online:
            raise InputError(
                f"The hub cannot be reached, and {named} for task {task.name!r} is not in the local cache: use "
                "--data-dir to give a folder with train and validation as .jsonl, .csv, .tsv or .parquet."
            ) from error
        raise InputError(f"Cannot load {named} from the hub: {one_line(error)}") from error
