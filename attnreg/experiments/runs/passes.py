"""Count forward and backward passes, a cost that does not depend on the machine."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class PassCounter:
    """Count the rows that go forward and backward through networks.

    A row counts once for each forward pass that returns logits, and once for each backward pass through them or the
    loss, with or without weight gradients. A plain training step counts each row once forward and once backward.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> class Network(nn.Linear):
        ...     def forward(self, x):
        ...         return SimpleNamespace(logits=super().forward(x))
        >>> network, passes = Network(2, 1), PassCounter()
        >>> with passes.counting([network]):
        ...     _ = network(torch.ones(3, 2))
        ...     network(torch.ones(3, 2)).logits.sum().backward()
        >>> passes.forward, passes.backward
        (6, 3)
    """

    def __init__(self, forward: int = 0, backward: int = 0) -> None:
        self.forward = forward
        self.backward = backward

    @contextmanager
    def counting(self, networks: Iterable[nn.Module]) -> Iterator[None]:
        """Count the passes of these networks within the block."""
        hooks = [network.register_forward_hook(self._forward) for network in networks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, network: nn.Module, args: Any, output: Any) -> None:
        logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
        if not isinstance(logits, Tensor):
            return
        rows = len(logits)
        self.forward += rows
        # A gradient may arrive through the loss, the logits, or both in turn: under mixed precision the returned logits
        # are a copy, and the loss is computed from the originals.
        seen = {"loss": 0, "logits": 0}

        def count(way: str, gradient: Tensor) -> None:
            before = max(seen.values())
            seen[way] += 1
            self.backward += rows * (max(seen.values()) - before)

        for way, tensor in (("loss", loss), ("logits", logits)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(count, way))
