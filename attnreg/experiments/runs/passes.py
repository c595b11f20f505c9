"""Counting what a training method costs, whatever the clock says."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class PassCounter:
    """Rows that went forward and backward through networks.

    A row counts each time that a network gives logits for it, and each time that a gradient flows back through them: a
    plain training step counts its batch once in both. A backward pass without weight gradients counts as well.

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
        """Count within the block."""
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
        # A gradient comes through the loss, through the logits, or first through one and then the other: under mixed
        # precision the logits that are given are a copy, and the loss is of the others.
        seen = {"loss": 0, "logits": 0}

        def count(way: str, gradient: Tensor) -> None:
            before = max(seen.values())
            seen[way] += 1
            self.backward += rows * (max(seen.values()) - before)

        for way, tensor in (("loss", loss), ("logits", logits)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(count, way))
