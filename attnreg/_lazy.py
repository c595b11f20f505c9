"""Public names that import their module on first use, so that ``attnreg --help`` does not wait for torch."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path


def listed_names(init: str) -> dict[str, str]:
    """The public names of a package, as its stub lists them.

    Args:
        init: the ``__file__`` of the package; beside it is ``__init__.pyi``, with one ``from module import Name as
            Name`` for each name. Type checkers read the same file.

    Returns:
        the module of each name.

    Example:
        >>> import attnreg
        >>> listed_names(attnreg.__file__)["DropHead"]
        'attnreg.providers.drop_head'
    """
    stub = Path(init).with_name("__init__.pyi")
    imports = (node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy_names(package: str, init: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """The ``__all__``, ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use (PEP 562).

    Args:
        package: the ``__name__`` of the package.
        init: its ``__file__``.
    """
    names = listed_names(init)

    def __getattr__(name: str) -> object:  # noqa: N807 (it becomes the module's)
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if names[name] == package:  # a module of the package itself
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(names[name]), name)

    return list(names), __getattr__, lambda: sorted(names)
