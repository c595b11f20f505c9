"""Saving and loading providers: a JSON description and safetensors, nothing that can run code."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import attnreg.providers  # noqa: F401  (defines the classes that files name)
from attnreg._checksums import SUMS, check_checksums, write_checksums
from attnreg._files import replaced_folder
from attnreg.errors import InputError
from attnreg.provider import MaskProvider

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def describe(provider: MaskProvider) -> dict[str, Any]:
    """A provider as plain data: its class name and its constructor's arguments, nested providers included.

    Example:
        >>> from attnreg import AttentionLayerDrop
        >>> describe(AttentionLayerDrop(p=0.2))
        {'provider': 'AttentionLayerDrop', 'config': {'p': 0.2}}
    """
    return {"provider": type(provider).__name__, "config": {k: _plain(v) for k, v in provider.config.items()}}


def _construct(cls: type[MaskProvider], *args: Any, **options: Any) -> MaskProvider:
    return cls(*args, **options)


def known_providers() -> dict[str, type[MaskProvider]]:
    """All provider classes that are loaded, by name, those of one's own too."""
    return {cls.__name__: cls for cls in _concrete_providers()}


def build(description: dict[str, Any], make: Callable[..., MaskProvider] = _construct) -> MaskProvider:
    """Undo :func:`describe`.

    Args:
        description: class name and constructor arguments.
        make: makes a provider of its class and arguments.

    Raises:
        ValueError: if the description names no known provider or does not fit its constructor.
    """
    known = known_providers()
    name, config = description.get("provider"), description.get("config")
    if name not in known or not isinstance(config, dict):
        raise ValueError(
            f"Expected `provider` to be one of {', '.join(sorted(known))}, with a `config`, got {name!r}; "
            "a provider of your own must be imported before it is loaded."
        )
    values = {key: _restored(value, make) for key, value in config.items()}
    signature = inspect.signature(known[name])
    try:
        positional = [
            item
            for key, parameter in signature.parameters.items()
            if parameter.kind is parameter.VAR_POSITIONAL
            for item in values.pop(key)
        ]
        return make(known[name], *positional, **values)
    except (TypeError, KeyError) as error:
        raise ValueError(f"Expected the arguments of {name}{signature}, got {config}: {error}.") from error


def save_provider(provider: MaskProvider, folder: str | os.PathLike[str]) -> None:
    """Write ``config.json``, ``model.safetensors`` and their checksums into ``folder``, whole or not at all.

    Raises:
        InputError: if an argument of the provider's constructor cannot be written down, as a function cannot, or the
            folder holds something else.
    """
    text = to_json(provider)
    folder = Path(folder).resolve()
    if folder.exists() and not _holds_a_provider(folder):
        raise InputError(
            f"Expected a new or empty folder for the provider, or one that holds a provider, got {folder}: a model's "
            "files have the same names, so save the provider into a folder of its own."
        )
    with replaced_folder(folder) as new:
        (new / CONFIG).write_text(text, encoding="utf-8")
        save_file({k: v.detach().cpu().contiguous() for k, v in provider.state_dict().items()}, new / WEIGHTS)
        write_checksums(new)


def to_json(provider: MaskProvider) -> str:
    """A provider's description as JSON.

    Raises:
        InputError: if an argument of its constructor cannot be written down.
    """
    description = describe(provider)
    try:
        return json.dumps(description, indent=2) + "\n"
    except TypeError as error:
        raise InputError(
            f"Expected the arguments of {type(provider).__name__} to be what JSON can hold, to save them, got: {error}."
        ) from error


def _holds_a_provider(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"not a folder"}
    if names - {CONFIG, WEIGHTS, SUMS}:
        return False
    try:
        return not names or "provider" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def load_provider(folder: str | os.PathLike[str]) -> MaskProvider:
    """Read what :func:`save_provider` wrote, on the CPU.

    Raises:
        ValueError: if the folder does not hold a provider, or a damaged one.
    """
    folder = Path(folder)
    try:
        check_checksums(folder)
        provider = build(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        provider.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"Expected a provider ({CONFIG} and {WEIGHTS}) in {folder}: {reason}") from error
    return provider


def _plain(value: Any) -> Any:
    if isinstance(value, MaskProvider):
        return describe(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple, nn.ModuleList)) else value


def _restored(value: Any, make: Callable[..., MaskProvider]) -> Any:
    if isinstance(value, dict) and "provider" in value:
        return build(value, make)
    return [_restored(item, make) for item in value] if isinstance(value, list) else value


def _concrete_providers() -> Iterator[type[MaskProvider]]:
    found: list[type] = [MaskProvider]
    for cls in found:  # grows while it is read
        found += cls.__subclasses__()
        if not inspect.isabstract(cls):
            yield cls
