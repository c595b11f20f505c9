"""One attention module of an attached model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnreg.injection.errors import HIDDEN_KERNELS, NoAttentionError
from attnreg.injection.mode import AttentionMode
from attnreg.masks import SiteInfo

if TYPE_CHECKING:
    from attnreg.injection.handle import AttachHandle

MARK = "_attnreg"


class AttachedModule:
    """Runs an attention module's forward under an :class:`AttentionMode` while the provider may act.

    It shadows ``forward`` on the instance. Hooks would not do: any hook on a child of ``nn.TransformerEncoderLayer``
    switches off its fast path, so that ``eval()`` would no longer be bitwise the plain model, and no hook runs when
    the forward is left by ``KeyboardInterrupt``, which would leave the mode on.

    Args:
        handle: the connection that this module is part of.
        module: the attention module.
        infos: the site of each of the module's calls in one forward pass of the model; ``None`` where not chosen.
            More than one where layers share the module (ALBERT).
    """

    def __init__(self, handle: AttachHandle, module: nn.Module, infos: Sequence[SiteInfo | None]) -> None:
        self.handle = handle
        self.module = module
        self.infos = tuple(infos)
        self.calls = 0
        self._shadowed = module.__dict__.get("forward")

    def install(self) -> None:
        """Shadow the module's forward."""
        setattr(self.module, MARK, self)
        self.module.forward = functools.partial(_forward, self)

    def remove(self) -> None:
        """Take the shadow away."""
        forward = self.module.__dict__.get("forward")
        if isinstance(forward, functools.partial) and forward.args and forward.args[0] is self:
            if self._shadowed is None:
                del self.module.forward
            else:
                self.module.forward = self._shadowed
        self.infos = (None,)  # if something else has wrapped the forward since, it goes on to the plain one
        self.module.__dict__.pop(MARK, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, under the provider's masks if they apply to this call."""
        info = self._next_site()
        tap = None if info is None else self.handle.taps.get(info.label)
        if info is None or (tap is None and not (self.module.training and self.handle.active)):
            return self._plain(*args, **kwargs)
        mode = AttentionMode(self.handle, info, tap)
        with mode:
            output = self._plain(*args, **kwargs)
        if not mode.hits:
            raise NoAttentionError(f"Expected attention in {info.name}, saw none in this forward: {HIDDEN_KERNELS}")
        return output

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self._shadowed is not None:
            return self._shadowed(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _next_site(self) -> SiteInfo | None:
        if len(self.infos) == 1:
            return self.infos[0]
        if not self.handle.in_forward and torch._C._current_graph_task_id() != -1:
            # Gradient checkpointing recomputes a shared module's calls during the backward pass, last call first.
            self.calls -= 1
            return self.infos[self.calls % len(self.infos)]
        self.calls += 1
        return self.infos[(self.calls - 1) % len(self.infos)]


def _forward(attached: AttachedModule, *args: Any, **kwargs: Any) -> Any:
    return attached.forward(*args, **kwargs)
