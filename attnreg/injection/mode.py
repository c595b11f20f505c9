"""The torch function mode that is active while an attached attention module runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnreg.injection.backends import multihead, sdpa, softmax
from attnreg.masks import AttentionSite, Mask, SiteInfo
from attnreg.provider import ask

if TYPE_CHECKING:
    from attnreg.injection.handle import AttachHandle
    from attnreg.injection.tap import Tap

_BACKENDS = {function: backend for backend in (sdpa, softmax, multihead) for function in backend.FUNCTIONS}


class AttentionMode(TorchFunctionMode):
    """Intercepts the attention of one module call and puts the provider's mask into it.

    Torch switches a mode off while it answers for a function, so providers and backends call torch as usual.

    Args:
        handle: knows the provider.
        info: the site of this call.
        tap: where the attention weights flow through; the provider is not asked then.
    """

    def __init__(self, handle: AttachHandle, info: SiteInfo, tap: Tap | None = None) -> None:
        super().__init__()
        self.handle = handle
        self.info = info
        self.tap = tap
        self.batch_size = handle.batch_size
        self.flat = info.label in handle.flat
        self.hits = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        backend = _BACKENDS.get(func)
        if backend is None:
            return func(*args, **(kwargs or {}))
        return backend.intercept(self, func, *args, **(kwargs or {}))

    @contextmanager
    def of_batch(self, batch_size: int) -> Iterator[None]:
        """Within the block, scores of shape ``(B * H, Q, K)`` have this B."""
        before = self.batch_size, self.flat
        self.batch_size, self.flat = batch_size, True
        try:
            yield
        finally:
            self.batch_size, self.flat = before

    def ask(
        self,
        shape: tuple[int, ...],
        valid: Tensor | None,
        *,
        like: Tensor,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> Mask | None:
        """The provider's mask for this site, checked and on the right device; ``None`` where it keeps everything."""
        self.hits += 1
        if self.tap is not None:
            return None
        site = AttentionSite(
            name=self.info.name,
            layer=self.info.layer,
            num_layers=self.info.num_layers,
            stack=self.info.stack,
            shape=shape,  # type: ignore[arg-type]
            valid=valid,
            query=query,
            key=key,
            device=like.device,
            dtype=like.dtype,
        )
        mask = ask(self.handle.provider, site)
        if mask is not None:
            mask = _checked(mask, site, type(self.handle.provider).__name__)
        self.handle.note(site, mask)
        return mask


def _checked(mask: Mask, site: AttentionSite, provider: str) -> Mask | None:
    tensors = {name: value for name, value in vars(mask).items() if isinstance(value, Tensor)}
    for field, tensor in tensors.items():
        try:
            fits = torch.broadcast_shapes(tensor.shape, site.shape) == torch.Size(site.shape)
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"Expected the {field} mask of {provider} to be broadcastable to (B, H, Q, K) = {tuple(site.shape)}, "
                f"got {tuple(tensor.shape)}, at {site.name}."
            )
    scores = mask.scores
    if scores is not None and scores.dim() == 0 and not torch.compiler.is_compiling() and bool(scores):
        del tensors["scores"]  # a whole layer, kept
    if not tensors.keys() - {"kept"}:
        return None
    if mask.drops_layer:
        return mask
    return Mask(**{name: tensor.to(site.device) for name, tensor in tensors.items()}, detach_sum=mask.detach_sum)
