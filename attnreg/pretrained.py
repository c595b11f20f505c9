"""Saving and loading providers: a JSON description and safetensors, nothing that can run code."""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from attnreg import providers
from attnreg._checksums import SUMS, check_checksums, write_checksums
from attnreg._files import replaced_folder
from attnreg.errors import InputError
from attnreg.provider import MaskProvider

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def _construct(cls: type[MaskProvider], *args: Any, **options: Any) -> MaskProvider:
    return cls(*args, **options)


def _built_in() -> dict[str, type[MaskProvider]]:
    return {name: getattr(providers, name) for name in providers.__all__}


def _name(cls: type[MaskProvider]) -> str:
    """Of a built-in provider its name, of any other the module too: one never stands for another."""
    return cls.__name__ if _built_in().get(cls.__name__) is cls else f"{cls.__module__}.{cls.__qualname__}"


def describe(provider: MaskProvider) -> dict[str, Any]:
    """A provider as plain data: the name of its class and its constructor's arguments, nested providers included.

    Example:
        >>> from attnreg import AttentionLayerDrop
        >>> describe(AttentionLayerDrop(p=0.2))
        {'provider': 'AttentionLayerDrop', 'config': {'p': 0.2}}
    """
    return {"provider": _name(type(provider)), "config": {k: _plain(v) for k, v in provider.config.items()}}


def known_providers(more: Iterable[type[MaskProvider]] = ()) -> dict[str, type[MaskProvider]]:
    """The built-in provider classes by name, and further ones.

    Args:
        more: classes of one's own; known by module and name, and by their name alone unless another has it too.

    Example:
        >>> known_providers()["DropHead"]
        <class 'attnreg.providers.drop_head.DropHead'>
    """
    own = {_name(cls): cls for cls in more}
    counts = Counter(cls.__name__ for cls in own.values())
    alone = {cls.__name__: cls for cls in own.values() if counts[cls.__name__] == 1}
    return {**alone, **own, **_built_in()}


def build(
    description: dict[str, Any],
    make: Callable[..., MaskProvider] = _construct,
    known: Mapping[str, type[MaskProvider]] | None = None,
) -> MaskProvider:
    """Undo :func:`describe`.

    Args:
        description: class name and constructor arguments.
        make: makes a provider of its class and arguments.
        known: classes by name; the built-in ones by default.

    Raises:
        ValueError: if the description names no known provider or does not fit its constructor.
    """
    known = _built_in() if known is None else known
    name, config = description.get("provider"), description.get("config")
    if not isinstance(name, str) or name not in known or not isinstance(config, dict):
        raise ValueError(
            f"Expected `provider` to be one of {', '.join(sorted(_built_in()))}, with a `config`, got {name!r}; pass a "
            "class of your own, `from_pretrained(folder, providers=[MyProvider])`."
        )
    values = {key: _restored(value, make, known) for key, value in config.items()}
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


def load_provider(folder: str | os.PathLike[str], more: Iterable[type[MaskProvider]] = ()) -> MaskProvider:
    """Read what :func:`save_provider` wrote, on the CPU.

    Args:
        folder: the folder.
        more: classes besides the built-in ones that it may name.

    Raises:
        ValueError: if the folder does not hold a provider, or a damaged one.
    """
    folder, known = Path(folder), known_providers(more)
    try:
        check_checksums(folder)
        provider = build(json.loads((folder / CONFIG).read_text(encoding="utf-8")), known=known)
        provider.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"Expected a provider ({CONFIG} and {WEIGHTS}) in {folder}: {reason}") from error
    return provider


def _plain(value: Any) -> Any:
    if isinstance(value, MaskProvider):
        return describe(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple, nn.ModuleList)) else value


def _restored(value: Any, make: Callable[..., MaskProvider], known: Mapping[str, type[MaskProvider]]) -> Any:
    if isinstance(value, dict) and "provider" in value:
        return build(value, make, known)
    return [_restored(item, make, known) for item in value] if isinstance(value, list) else value
