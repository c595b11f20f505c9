"""The attention functions that can be masked, one per file."""

from __future__ import annotations

import importlib
import pkgutil

from attnreg.injection.backends.base import BY_FUNCTION, Asked, Backend, Call, Noting, Tap

__all__ = ["BACKENDS", "BY_FUNCTION", "Asked", "Backend", "Call", "Noting", "Tap"]

BACKENDS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND
    for module in (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    if hasattr(module, "BACKEND")
}
