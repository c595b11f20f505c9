"""Check quickly whether the Hugging Face hub can be reached."""

from __future__ import annotations

import functools
import os
import urllib.error
import urllib.request

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
    """If the hub cannot be reached, switch the Hugging Face libraries to their local cache.

    Without this, ``datasets`` retries for 23 seconds and ``transformers`` for 24 before they fail.

    Returns:
        whether the hub can be reached.
    """
    if reachable():
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    return False
