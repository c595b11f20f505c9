"""The attention functions that can be masked, one file each."""

from __future__ import annotations

import importlib
import pkgutil

from attnreg.injection.backends.base import BY_FUNCTION, Asked, Backend, Call, Noting, Tap

__all__ = ["BACKENDS", "BY_FUNCTION", "Asked", "Backend", "Call", "Noting", "Tap"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        importlib.import_module(f"{__name__}.{found.name}").BACKEND
        for found in pkgutil.iter_modules(__path__)
        if found.name not in ("base", "layout")
    )
}
