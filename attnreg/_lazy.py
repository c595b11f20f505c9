"""Names that import their module on first use, so that ``attnreg --help`` does not wait for torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package that exports names lazily (PEP 562).

    Args:
        package: the package's ``__name__``.
        modules: for each public name, the module that defines it; a name that is itself a module maps to its path.

    Returns:
        the two functions to assign at the package's module level.
    """

    def __getattr__(name: str) -> object:  # noqa: N807 (it becomes the module's)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    return __getattr__, lambda: sorted(modules)
