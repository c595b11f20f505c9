"""Models whose parameters are spread over several processes."""

from __future__ import annotations

from torch import nn


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's parameters are spread over several processes: by FSDP2, or by tensor parallelism."""
    return any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())
