"""One attention module of an attached model."""

from __future__ import annotations

from typing import Any

from attnreg.injection.mode import AttentionMode, Planned
from attnreg.injection.shadow import Shadow


class AttachedModule(Shadow[tuple[Planned, ...]]):
    """Runs an attention module's forward under an :class:`AttentionMode` while the provider may act."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, under the provider's masks if they apply to this call."""
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
                output = self.plain(*args, **kwargs)
        finally:
            handle.mode = before
        mode.check_all_seen()
        return output

    def _is_tapped(self, plan: tuple[Planned, ...]) -> bool:
        return any(each.info is not None and each.info.label in self.handle.taps for each in plan)
