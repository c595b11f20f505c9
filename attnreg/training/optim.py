"""The optimizer of the recipes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW

from attnreg.errors import InputError
from attnreg.training.levels import levels_of


def adamw(model: nn.Module, learning_rate: float, weight_decay: float = 0.01, *, layerwise_decay: float = 1.0) -> AdamW:
    r"""Make AdamW without weight decay on vectors, that is, on biases and normalization weights.

    Args:
        model: the model.
        learning_rate: peak learning rate.
        weight_decay: weight decay of matrices.
        layerwise_decay: learning rate of each block, divided by that of the block above it: block :math:`l` of
            :math:`L`, counted from 1, gets :math:`\eta\, \xi^{L - l}`, the embeddings get :math:`\eta\, \xi^L`. The
            top block and all above it get the full rate.

    Raises:
        InputError: if ``layerwise_decay`` is not in (0, 1], or the model's blocks are not known.

    Reference:
        Layer-wise decay: Zhang et al. (ICLR 2021, arXiv 2006.05987), Section 6, in whose code blocks and embeddings
        have one factor :math:`\xi` more; Howard and Ruder (ACL 2018, arXiv 1801.06146).

    Example:
        >>> [group["weight_decay"] for group in adamw(nn.Linear(2, 2), 1e-3).param_groups]
        [0.01, 0.0]
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> sorted({group["lr"] for group in adamw(model, 0.1, layerwise_decay=0.5).param_groups})
        [0.05, 0.1]
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected the model, whose parameters are to be trained, got a {type(model).__name__}.")
    if not 0 < layerwise_decay <= 1:
        raise InputError(f"Expected `layerwise_decay` to be in (0, 1], got {layerwise_decay!r}.")
    alike = layerwise_decay == 1
    levels = [list(model.parameters())] if alike else levels_of(model)
    groups: list[dict[str, Any]] = []
    for level, parameters in enumerate(levels):
        # The last block has the full rate; the last level is all above it.
        rate = learning_rate * layerwise_decay ** max(0, len(levels) - 2 - level)
        for is_matrix, decay in ((True, weight_decay), (False, 0.0)):
            own = [p for p in parameters if p.requires_grad and (p.dim() > 1) is is_matrix]
            groups += [{"params": own, "weight_decay": decay, "lr": rate}] if own or alike else []
    return AdamW(groups, lr=learning_rate, fused=True)  # fused: one pass over memory instead of about twelve
