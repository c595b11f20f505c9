"""Where a model is: in a folder, in the local cache or on the hub; without torch."""

from __future__ import annotations

import functools
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from attnreg.errors import InputError

_TIMEOUT_S = 3.0


@functools.cache
def offline_if_unreachable() -> None:
    """Switch the Hugging Face libraries to their local cache if the hub does not answer in time.

    A process tries the hub once. Without this, ``datasets`` retries for 23 seconds, and ``transformers`` for 24.
    """
    from huggingface_hub import constants

    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        if not constants.HF_HUB_OFFLINE:
            urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # an error status is an answer too
    except (OSError, ValueError):
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # else it reads the environment
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def located(folder: Path, name: str) -> str:
    """Say whether a model is in a folder or on the hub; raise if the folder, the value of ``name``, holds no model."""
    if not folder.is_dir():
        offline_if_unreachable()
        return "no such folder, so a hub name"
    if not (folder / "config.json").is_file() or (folder / "telemetry.jsonl").is_file():
        inner = folder / "model"
        problem = f"the folder of a run: give {inner}" if inner.is_dir() else "without config.json"
        raise InputError(f"Expected {name} to be the folder of a model, got {folder}, {problem}.")
    return "a folder"


def check_there(model: str, name: str = "--model", *, asked: bool = True) -> str:
    """Say where a model is, or raise if it is in no folder, not in the local cache, and the hub does not answer.

    ``asked`` says whether the user chose the model, by ``name``, and it is not the default of the task.
    """
    if (Path(model) / "adapter_config.json").is_file():
        return "an adapter"
    if (where := located(Path(model), name)) == "a folder":
        return where
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
        reason = "not in the local cache, and the hub does not answer" * (constants.HF_HUB_OFFLINE and not cached)
    except HFValidationError:
        reason = "and it is no name on the hub"
    if reason and asked:
        raise InputError(f"No model {model}: there is no such folder, {reason}.")
    if reason:
        raise InputError(
            f"Without --model, this task uses {model} from the hub, which is {reason}: give the folder of a model with "
            "--model."
        )
    return where
