"""Log to TensorBoard, Weights & Biases and other trackers through accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from transformers.utils.generic import flatten_dict

from attnreg.errors import InputError, did_you_mean


def check_trackers(names: Sequence[str]) -> None:
    """Check that all trackers are installed; accelerate would skip missing ones silently."""
    available = sorted(str(tracker.value) for tracker in get_available_trackers())
    if missing := [name for name in names if name not in available]:
        raise InputError(
            f"Expected --report-to to be an installed tracker ({', '.join(available) or 'none found'}), got "
            f"{', '.join(missing)}. Install its package.{did_you_mean(missing[0], available)}"
        )


@contextmanager
def tracked(accelerator: Accelerator, options: Mapping[str, Any]) -> Iterator[None]:
    """Run the accelerator's trackers within the block, with the options of a run."""
    plain = {name: value for name, value in options.items() if isinstance(value, (int, float, str, bool))}
    accelerator.init_trackers("attnreg", config=plain)
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()  # not `end_training`, which would also destroy the process group


def flattened(record: Mapping[str, Any], *prefix: str) -> dict[str, float]:
    """Flatten the numbers of a nested record; keys become paths. Lists, such as drop rates by head, are left out."""
    flat = flatten_dict({**record}, "/".join(prefix), delimiter="/")
    return {name: value for name, value in flat.items() if isinstance(value, (int, float))}
