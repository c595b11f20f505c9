"""Log to TensorBoard, Weights & Biases and other trackers through accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attnreg.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from accelerate import Accelerator

_SAME = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
_PACKAGES = {**{name: (name,) for name in _SAME}, "tensorboard": ("tensorboard", "tensorboardX")}  # of trackers


def check_trackers(names: Sequence[str]) -> None:
    """Check, without importing them, that all trackers are installed; accelerate would skip missing ones silently."""
    available = available_trackers() if names else []
    if missing := [name for name in names if name not in available]:
        raise InputError(
            f"Expected --report-to to be an installed tracker ({', '.join(available) or 'none found'}), got "
            f"{', '.join(missing)}. Install its package.{did_you_mean(missing[0], available)}"
        )


def available_trackers() -> list[str]:
    """Return the trackers that are installed; a folder such as ``wandb/``, which a tracker makes, is no package."""
    specs = {name: [*map(find_spec, packages)] for name, packages in _PACKAGES.items()}
    return sorted(name for name, some in specs.items() if any(spec is not None and spec.origin for spec in some))


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
    from transformers.utils.generic import flatten_dict  # late: it is slow to import

    flat = flatten_dict({**record}, "/".join(prefix), delimiter="/")
    return {name: value for name, value in flat.items() if isinstance(value, (int, float))}
