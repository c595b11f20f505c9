"""Steps before training: other values for pretrained weights, and the optimizer of the recipes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from attnreg.arguments import Count, NotNegative, not_negative, whole_number
from attnreg.errors import InputError
from attnreg.training.levels import base_of, blocks_of, levels_of

_FLAG = "_is_hf_initialized"  # transformers does not initialize tensors with this attribute


@torch.no_grad()
def reinitialize_top(model: nn.Module, layers: Count) -> list[str]:
    """Re-initialize the top blocks and the pooler of a pretrained model, as a new model of its class would be.

    Call it before you make the optimizer. The values are drawn from torch's global generator.

    Args:
        model: a transformers model, whose ``_init_weights`` initializes the modules.
        layers: number of blocks, counted from the top.

    Returns:
        the names of the modules.

    Raises:
        InputError: if the model has no ``_init_weights``, or this leaves a matrix unchanged, or there are fewer blocks
            than ``layers``, or blocks without an order. The model is unchanged then.

    Reference:
        Revisiting Few-sample BERT Fine-tuning (Zhang et al., ICLR 2021, arXiv 2006.05987), Section 5.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2))
        >>> reinitialize_top(model, 1)
        ['bert.encoder.layer.2', 'bert.pooler']
    """
    blocks = blocks_of(model)
    if whole_number("layers", layers) > len(blocks):
        raise InputError(f"{type(model).__name__} has {len(blocks)} blocks, too few to re-initialize {layers}.")
    initialize = getattr(model, "_init_weights", None)
    if not callable(initialize):
        raise InputError(f"{type(model).__name__} has no `_init_weights`, which transformers models initialize by.")
    pooler = getattr(base_of(model), "pooler", None)
    parts = [*blocks[-layers:], *([pooler] if isinstance(pooler, nn.Module) else [])]
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    copies = [tensor.clone() for tensor in tensors]
    flags = [vars(tensor).pop(_FLAG, None) for tensor in tensors]
    for part in parts:
        part.apply(initialize)
    for tensor, flag in zip(tensors, flags, strict=True):
        if flag is not None:
            setattr(tensor, _FLAG, flag)
    matrices: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    pairs = [*zip(tensors, copies, strict=True)]
    if unchanged := [tensor for tensor, copy in pairs if tensor in matrices and tensor.equal(copy)]:
        for tensor, copy in pairs:
            tensor.copy_(copy)
        raise InputError(f"`_init_weights` of {type(model).__name__} does not initialize {matrices[unchanged[0]]}.")
    return [name for part in parts for name, module in model.named_modules() if module is part]


@torch.no_grad()
def noisy_tune(model: nn.Module, intensity: NotNegative = 0.15) -> None:
    r"""Add uniform noise to every parameter tensor of a model, in proportion to its standard deviation.

    .. math:: \tilde W = W + \mathrm U\left(-\tfrac\lambda2, \tfrac\lambda2\right) \cdot \mathrm{std}(W)

    The ``intensity`` is :math:`\lambda`. Call it once, after loading the pretrained weights and before you make the
    optimizer. Noise is drawn from torch's global generator. A tensor of one value, or of equal values, stays as it is.

    Raises:
        InputError: if ``intensity`` is out of range, the model has adapters, or some weights are quantized or have no
            values. The model is unchanged then.

    Reference:
        NoisyTune (Wu et al., ACL 2022, arXiv 2202.12024).

    Example:
        >>> layer = nn.Linear(100, 100)
        >>> before = layer.weight.detach().clone()
        >>> noisy_tune(layer, 0.2)
        >>> bool(((layer.weight - before).abs() <= 0.1 * before.std() + 1e-6).all())
        True
    """
    not_negative("intensity", intensity)
    if hasattr(model, "peft_config"):
        raise InputError("NoisyTune changes the weights below the adapters, which are not saved: call it without LoRA.")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.is_meta:
            raise InputError(
                f"NoisyTune cannot add noise to {name}, which is quantized or has no values: load the model in float32."
            )
    for parameter in model.parameters():
        if parameter.numel() > 1:
            exact = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.copy_(exact + intensity * exact.std() * (torch.rand_like(exact) - 0.5))


def adamw(model: nn.Module, learning_rate: float, weight_decay: float = 0.01, *, layerwise_decay: float = 1.0) -> AdamW:
    r"""Make AdamW without weight decay on vectors, that is, on biases and normalization weights.

    Args:
        model: the model.
        learning_rate: peak learning rate.
        weight_decay: weight decay of matrices.
        layerwise_decay: learning rate of a block, divided by the rate of the block above it: block :math:`l` of
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
        raise InputError(f"Expected the model whose parameters will be trained, got a {type(model).__name__}.")
    if not 0 < layerwise_decay <= 1:
        raise InputError(f"Expected `layerwise_decay` to be in (0, 1], got {layerwise_decay!r}.")
    is_uniform = layerwise_decay == 1
    levels = [list(model.parameters())] if is_uniform else levels_of(model)
    groups: list[dict[str, Any]] = []
    for level, parameters in enumerate(levels):
        # The last block has the full rate; the last level is all above it.
        rate = learning_rate * layerwise_decay ** max(0, len(levels) - 2 - level)
        for is_matrix, decay in ((True, weight_decay), (False, 0.0)):
            chosen = [p for p in parameters if p.requires_grad and (p.dim() > 1) is is_matrix]
            groups += [{"params": chosen, "weight_decay": decay, "lr": rate}] if chosen or is_uniform else []
    return AdamW(groups, lr=learning_rate, fused=True)  # fused: one pass over memory instead of about twelve
