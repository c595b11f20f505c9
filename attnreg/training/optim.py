"""The optimizer of the recipes."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW


def adamw(model: nn.Module, learning_rate: float, weight_decay: float = 0.01) -> AdamW:
    """Make AdamW without weight decay on vectors, that is, on biases and normalization weights.

    Example:
        >>> [group["weight_decay"] for group in adamw(nn.Linear(2, 2), 1e-3).param_groups]
        [0.01, 0.0]
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=learning_rate, fused=True)  # one pass over memory instead of about twelve
