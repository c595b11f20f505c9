"""Saving and loading of regularizers as JSON and safetensors, which cannot run code."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typing_extensions import Self

import attnreg
from attnreg._files import SUMS, check_checksums, replaced_folder, write_checksums
from attnreg._lazy import REGULARIZERS, listed_names
from attnreg.errors import InputError, one_line
from attnreg.regularizer.parsing import shown

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class PretrainedMixin:
    """``save_pretrained`` and ``from_pretrained`` for regularizers; see :class:`attnreg.Regularizer`."""

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, by name."""
        names = self._argument_names()
        if missing := [name for name in names if not hasattr(self, name)]:
            raise InputError(
                f"{type(self).__name__} must store its constructor's arguments as attributes of the same names: "
                f"missing {', '.join(missing)}."
            )
        values = {name: self._argument(name) for name in names}
        options = values.pop(inspect.getfullargspec(type(self).__init__).varkw or "", {})
        return {**values, **options}

    def extra_repr(self) -> str:
        """Return the arguments for ``repr(provider)``."""
        values = ((name, self._argument(name)) for name in self._argument_names() if hasattr(self, name))
        return ", ".join(f"{name}={value!r}" for name, value in values if not isinstance(value, nn.Module))

    def _argument_names(self) -> list[str]:
        init = type(self).__init__
        return [] if init is nn.Module.__init__ else list(inspect.signature(init).parameters)[1:]

    def _argument(self, name: str) -> Any:
        value = getattr(self, name)
        return value.item() if isinstance(value, Tensor) and not value.dim() else value  # a schedule changes it

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json``, ``model.safetensors`` and their checksums into a separate folder, atomically.

        Args:
            folder: a new or empty folder, or one with a saved regularizer, which is replaced.

        Raises:
            InputError: if the folder holds other files, or JSON cannot store a constructor argument.
        """
        assert isinstance(self, nn.Module)
        text, folder = to_json(self), Path(folder).resolve()
        if folder.exists() and not _holds_a_provider(folder):
            raise InputError(f"{folder} holds other files of these names, such as a model's: save into another folder.")
        with replaced_folder(folder) as target:
            (target / CONFIG).write_text(text, encoding="utf-8")
            save_file({k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()}, target / WEIGHTS)
            write_checksums(target)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], providers: Sequence[type[PretrainedMixin]] = ()) -> Self:
        """Load a regularizer that :meth:`save_pretrained` wrote, on the CPU.

        Args:
            folder: the folder with the regularizer.
            providers: your classes inside the saved regularizer, besides this one.

        Raises:
            InputError: if the folder holds no regularizer of this class, or a damaged one, or names an unknown class.
        """
        folder, known = Path(folder), known_providers(providers if inspect.isabstract(cls) else {cls, *providers})
        try:
            check_checksums(folder)
            provider = build(json.loads((folder / CONFIG).read_text(encoding="utf-8")), known)
            provider.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError, SafetensorError) as error:
            reason = one_line(error)
            raise InputError(f"Cannot load a provider ({CONFIG} and {WEIGHTS}) from {folder}: {reason}") from error
        if not isinstance(provider, cls):
            raise InputError(
                f"Expected a {cls.__name__} in {folder}, got a {type(provider).__name__}: "
                "`attnreg.Regularizer.from_pretrained` loads any."
            )
        return provider


def built_in() -> dict[str, type[PretrainedMixin]]:
    """Return the built-in regularizer classes, by name."""
    modules = {n: m for n, m in listed_names(attnreg.__file__).items() if m.startswith(REGULARIZERS)}
    values = {name: getattr(importlib.import_module(module), name) for name, module in modules.items()}
    classes = {name: cls for name, cls in values.items() if inspect.isclass(cls) and issubclass(cls, PretrainedMixin)}
    return {name: cls for name, cls in classes.items() if not inspect.isabstract(cls)}


def describe(provider: PretrainedMixin) -> dict[str, Any]:
    """Return a regularizer as plain data, such as ``{"provider": "AttentionLayerDrop", "config": {"p": 0.2}}``."""
    return {"provider": _name(type(provider)), "config": {k: _plain(v) for k, v in provider.config.items()}}


def known_providers(classes: Iterable[type[Any]] = ()) -> dict[str, type[Any]]:
    """Return the built-in classes by name, and further ones by module and name, also by name if it is unique."""
    qualified = {_name(cls): cls for cls in classes}
    counts = Counter(cls.__name__ for cls in qualified.values())
    unique = {cls.__name__: cls for cls in qualified.values() if counts[cls.__name__] == 1}
    return {**unique, **qualified, **built_in()}


def _name(cls: type[PretrainedMixin]) -> str:
    """Return a built-in class's name, or any other class's module and name, so that the two are never confused."""
    return cls.__name__ if built_in().get(cls.__name__) is cls else f"{cls.__module__}.{cls.__qualname__}"


def build(description: dict[str, Any], known: Mapping[str, type[Any]]) -> Any:
    """Make a regularizer from its description by :func:`describe`."""
    name, config = description.get("provider"), description.get("config")
    if not isinstance(name, str) or name not in known or not isinstance(config, dict):
        raise InputError(
            f"Expected `provider` to be one of {', '.join(sorted(built_in()))}, with a `config`, got {name!r}; pass "
            "your class as in `from_pretrained(folder, providers=[MyProvider])`."
        )
    values = {key: _restored(value, known) for key, value in config.items()}
    signature = inspect.signature(known[name])
    variable = [key for key, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_POSITIONAL]
    try:
        positional = [] if known[name].__init__ is nn.Module.__init__ else [values.pop(key) for key in variable]
        return known[name](*itertools.chain(*positional), **values)
    except (TypeError, KeyError) as error:
        raise InputError(f"Expected the arguments of {name}{shown(signature)}, got {config}: {error}.") from error


def to_json(provider: PretrainedMixin) -> str:
    """Return a regularizer's description as JSON, or raise if JSON cannot store a constructor argument."""
    try:
        return json.dumps(describe(provider), indent=2) + "\n"
    except TypeError as error:
        raise InputError(
            f"{type(provider).__name__} cannot be saved, because JSON cannot store one of its arguments: {error}."
        ) from error


def _holds_a_provider(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"not a folder"}
    if names - {CONFIG, WEIGHTS, SUMS}:
        return False
    try:
        return not names or "provider" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _plain(value: Any) -> Any:
    if isinstance(value, PretrainedMixin):
        return describe(value)
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise TypeError(f"a key of {value} is no string")
    return [_plain(item) for item in value] if isinstance(value, (list, tuple, nn.ModuleList)) else value


def _restored(value: Any, known: Mapping[str, type[Any]]) -> Any:
    if isinstance(value, dict) and "provider" in value:
        return build(value, known)
    return [_restored(item, known) for item in value] if isinstance(value, list) else value
