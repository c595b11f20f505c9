"""One attention module of an attached model."""

from __future__ import annotations

from typing import Any

from attnreg.injection.errors import HIDDEN_KERNELS, NoAttentionError
from attnreg.injection.mode import AttentionMode
from attnreg.injection.shadow import Shadow
from attnreg.masks import SiteInfo


class AttachedModule(Shadow[SiteInfo]):
    """Runs an attention module's forward under an :class:`AttentionMode` while the provider may act."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, under the provider's masks if they apply to this call."""
        info = self.next()
        tap = None if info is None else self.handle.taps.get(info.label)
        if info is None or (tap is None and not (self.module.training and self.handle.active)):
            return self.plain(*args, **kwargs)
        mode = AttentionMode(self.handle, info, tap)
        with mode:
            output = self.plain(*args, **kwargs)
        if not mode.hits:
            raise NoAttentionError(f"Expected attention in {info.name}, saw none in this forward: {HIDDEN_KERNELS}")
        return output
