"""Import public names on first use, so that ``attnreg --help`` does not need to import torch."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from attnreg.errors import did_you_mean

#: where the regularizers among the public names are defined
REGULARIZERS = ("attnreg.regularizer", "attnreg.attendout")


def listed_names(init: str) -> dict[str, str]:
    """Read the public names of a package, and their modules, from the stub beside its ``__file__``."""
    stub = Path(init).with_name("__init__.pyi")
    imports = (node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy_names(
    package: str, init: str, deprecated: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Make ``__all__``, ``__getattr__`` and ``__dir__`` of a package from its name and its file (PEP 562)."""
    names = listed_names(init)
    modules = {**names, **dict.fromkeys(deprecated, "attnreg.deprecated")}

    def __getattr__(name: str) -> object:  # noqa: N807 (it becomes the module's)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{did_you_mean(name, names)}")
        if modules[name] == package:  # a module of the package itself
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(modules[name]), name)

    return list(names), __getattr__, lambda: sorted(names)
