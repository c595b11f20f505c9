"""One attention module of an attached model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from attnreg.injection.backends import BACKENDS
from attnreg.injection.connection import Connection
from attnreg.injection.errors import NoAttentionError
from attnreg.injection.mode import AttentionMode, Planned
from attnreg.injection.shadow import Shadow


class AttachedModule(Shadow[tuple[Planned, ...]]):
    """Runs an attention module's forward under an :class:`AttentionMode` while the provider may act."""

    def __init__(
        self, handle: Connection, module: nn.Module, plans: Sequence[tuple[Planned, ...] | None], name: str
    ) -> None:
        super().__init__(handle, module, plans, name)
        used = {planned.backend for plan in plans if plan is not None for planned in plan}
        self._patched = [name for name in sorted(used) if BACKENDS[name].needs_patches]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with the provider's masks if they apply to this call."""
        plan = self.next()
        handle = self.handle
        before = handle.mode
        if plan is None or not (self._is_tapped(plan) or handle.acts_on(self.module)):
            handle.mode = None
            try:
                return self.plain(*args, **kwargs)
            finally:
                handle.mode = before
        handle.check_entry(self.name)
        mode = handle.mode = AttentionMode(handle, plan, self.name)
        try:
            with mode:
                output = self._under_patches(*args, **kwargs) if self._patched else self.plain(*args, **kwargs)
        finally:
            handle.mode = before
        mode.check_all_seen()
        return output

    def _under_patches(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise NoAttentionError(
                f"{self.name} computes its attention with {', '.join(self._patched)}, which cannot be masked in a "
                "compiled model. Do not compile the model (the kernel itself is compiled), or load it with "
                "attn_implementation='sdpa'."
            )
        with ExitStack() as stack:
            for backend in self._patched:
                stack.enter_context(BACKENDS[backend].patched())
            return self.plain(*args, **kwargs)

    def _is_tapped(self, plan: tuple[Planned, ...]) -> bool:
        return any(each.info is not None and each.info.label in self.handle.taps for each in plan)
