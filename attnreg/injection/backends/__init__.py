"""One file per way in which models compute attention."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from attnreg.injection.backends.base import Backend, Call

__all__ = ["BACKENDS", "BY_FUNCTION", "Backend", "Call"]

BACKENDS: tuple[Backend, ...] = tuple(
    importlib.import_module(f"{__name__}.{found.name}").BACKEND
    for found in pkgutil.iter_modules(__path__)
    if found.name != "base"
)
BY_FUNCTION: dict[Callable[..., Any], Backend] = {
    function: backend for backend in BACKENDS for function in backend.functions
}
