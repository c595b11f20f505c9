"""NoisyTune: a little noise on pretrained weights, once, before training."""

from __future__ import annotations

import torch
from torch import nn

from attnreg.arguments import NotNegative, not_negative
from attnreg.errors import InputError


@torch.no_grad()
def noisy_tune(model: nn.Module, intensity: NotNegative = 0.15) -> None:
    r"""Add uniform noise to each parameter tensor of a model, in proportion to its standard deviation.

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
