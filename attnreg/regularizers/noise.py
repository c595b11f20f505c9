"""Noise on the hidden states that enter the first block (NEFTune) or every block (HyPe)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import NotNegative, not_negative, one_of
from attnreg.errors import InputError
from attnreg.functional.seeded import is_traced
from attnreg.outputs import IGNORED, shifts_labels
from attnreg.regularizer.providers import HiddenProvider
from attnreg.sites import HiddenSite, SiteInfo

Tokens = Literal["all", "prompt"]
Distribution = Literal["normal", "uniform"]


class EmbeddingNoise(HiddenProvider):
    r"""Add uniform noise to the states that enter the first block (NEFTune).

    .. math:: h'_{btc} = h_{btc} + \frac{\alpha}{\sqrt{L_b C}} u_{btc}, \qquad u_{btc} \sim U(-1, 1)

    :math:`L_b` is the number of tokens of sample b without padding, or of its prompt, and C the number of features. The
    Trainer's ``neftune_noise_alpha`` adds its noise at the embedding module instead, and counts padding in L.

    Args:
        alpha: the size of the noise; 0 adds none.
        tokens: ``"all"``, or ``"prompt"``: only the tokens of a causal language model with label -100 that are no
            padding, so that the response stays as it is.

    Raises:
        InputError: in a forward pass, if the padding of the states or the prompt is unknown; when attached, if only
            prompts get noise and the model is no causal language model.

    Reference:
        NEFTune (ICLR 2024, arXiv 2310.05914), Algorithm 1.

    Example:
        >>> states = EmbeddingNoise(alpha=4.0)(HiddenSite(shape=(1, 4, 4)), torch.zeros(1, 4, 4))
        >>> bool((states.abs() <= 1.0).all())
        True
    """

    where = "embeddings"
    schedulable = ("alpha",)
    effect = "adds noise"

    def __init__(self, alpha: NotNegative = 5.0, tokens: Tokens = "all") -> None:
        super().__init__()
        self.alpha = not_negative("alpha", alpha)
        self.tokens = one_of("tokens", tokens, get_args(Tokens))
        self._labels: Any = None  # labels of the latest pass
        self._has_prompts = False
        self._rounding = Rounding("EmbeddingNoise")

    @property
    @override
    def draws_in_prepare(self) -> bool:
        return self.tokens == "prompt"  # the labels are valid until the next pass

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if self.tokens == "prompt" and not shifts_labels(model):
            raise InputError(f"Only causal language models have prompts; {type(model).__name__} is none.")

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        if self.tokens == "prompt":
            self._labels = inputs.get("labels")

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        chosen = self._prompts(site) if self.tokens == "prompt" else site.tokens
        lengths = chosen.sum(1).clamp(min=1).to(torch.promote_types(site.dtype, torch.float32))
        size = (self.alpha / (lengths * site.shape[-1]).sqrt()).to(site.dtype)[:, None, None]
        noise = (site.uniform(dtype=site.dtype) * 2 - 1) * size
        return self._rounding.add(states, noise if self.tokens == "all" else noise * chosen.unsqueeze(-1))

    def _prompts(self, site: HiddenSite) -> Tensor:
        fits = isinstance(self._labels, Tensor) and self._labels.shape == site.shape[:2]
        prompts = site.tokens & (self._labels.to(site.device) == IGNORED) if fits else site.tokens
        if not fits or not (is_traced() or self._has_prompts or prompts.any()):
            raise InputError(
                f"EmbeddingNoise(tokens='prompt') needs `labels` of shape {tuple(site.shape[:2])} in the model's "
                "inputs, -100 for the tokens of the prompt; the first batch must have such tokens."
            )
        self._has_prompts = True
        return prompts


class HiddenNoise(HiddenProvider):
    r"""Add noise to the hidden states that enter each block (HyPe).

    .. math:: h'_{btc} = h_{btc} + \epsilon_{btc}, \qquad
        \epsilon_{btc} \sim \mathcal N(0, \sigma^2) \;\text{ or }\; \epsilon_{btc} \sim U(-\sigma, \sigma)

    :class:`attnreg.EmbeddingNoise`, in contrast, adds noise once, of a size that depends on the length.

    Args:
        scale: :math:`\sigma`, the standard deviation of normal noise, or the bound of uniform noise.
        distribution: ``"normal"`` or ``"uniform"``.

    Warns:
        UserWarning: if most of the noise is lost, because the states are in half precision.

    Reference:
        HyPe (ACL 2023, arXiv 2212.08853).

    Example:
        >>> states = HiddenNoise(0.1, "uniform")(HiddenSite(shape=(1, 4, 4)), torch.zeros(1, 4, 4))
        >>> bool((states.abs() <= 0.1).all())
        True
    """

    where = "input"
    schedulable = ("scale",)
    effect = "adds noise"

    def __init__(self, scale: NotNegative = 1e-5, distribution: Distribution = "normal") -> None:
        super().__init__()
        self.scale = not_negative("scale", scale)
        self.distribution = one_of("distribution", distribution, get_args(Distribution))
        self._rounding = Rounding("HiddenNoise")

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        if self.distribution == "normal":
            noise = site.normal(dtype=site.dtype)
        else:
            noise = site.uniform(dtype=site.dtype) * 2 - 1
        return self._rounding.add(states, noise * self.scale)


class Rounding:
    """Warns once if at least half of the noise that ``owner`` adds to values in half precision is lost."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._has_checked = False

    def add(self, values: Tensor, noise: Tensor) -> Tensor:
        """Return the sum of values and noise, of one shape."""
        noisy = values + noise
        if self._has_checked or noisy.dtype.itemsize > 2 or is_traced():
            return noisy
        self._has_checked = True
        lost = float(((noisy == values) & (noise != 0)).sum() / (noise != 0).sum().clamp(min=1))
        if lost >= 0.5:
            warnings.warn(
                f"{lost:.0%} of the noise of {self._owner} is lost, because it is smaller than the rounding of "
                f"{noisy.dtype}. Use larger noise, or keep the model in float32 and train with autocast.",
                stacklevel=2,
            )
        return noisy
