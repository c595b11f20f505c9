"""Adversarial self-attention: learned masks that raise the model's loss, at a price."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, functional
from attnreg.arguments import LARGEST_SIZE, inner_probability, not_negative, true_or_false, whole_number
from attnreg.functional.validity import mean_over
from attnreg.regularizers._parts.layers import Depth, SeesQueries


class AdversarialAttention(SeesQueries):
    r"""Mask attention scores with a small network per layer that learns to raise the loss.

    .. math:: \begin{aligned} & s = \frac{(q Q')(k K')^\top}{\sqrt{d}} + b, \\
        & M_{ij} \sim \mathrm{Bernoulli}(\sigma(s_{ij})), \\ & S_{ij} = -\infty \text{ if } M_{ij} = 0 \end{aligned}

    q and k are the model's queries and keys with all heads concatenated, without gradients; all heads share one mask.
    The gradient passes straight through the decisions, as if M were :math:`\sigma(s)`, and is reversed: one optimizer,
    with the provider's parameters, trains both. ``penalty()`` is the price that the network pays for masking:

    .. math:: c \cdot \mathrm{mean}_l\, \mathrm{mean}_{bij}\, (1 - \sigma(s_{ij}))

    Args:
        num_layers, num_heads, head_size: L, H and D of the model; :meth:`for_model` sets them.
        generator_size: d (default: H · D, as in the paper).
        initial_keep: keep probability before training, in ``(0, 1)``; b starts at its logit.
        price: c, the price of masking everything, in units of the loss.
        sampled: draw the masks; otherwise, mask a unit if :math:`\sigma(s) \le 1/2`.

    Shape:
        masks are ``(B, 1, Q, K)``, float with the values 0 and 1.

    Reference:
        Adversarial Self-Attention for Language Understanding (AAAI 2023, arXiv 2206.12608).

    Example:
        >>> provider = AdversarialAttention(num_layers=1, num_heads=2, head_size=4, initial_keep=0.5)
        >>> query = key = torch.randn(1, 2, 3, 4)
        >>> mask = provider(AttentionSite(shape=(1, 2, 3, 3), query=query, key=key))
        >>> mask.normalized.shape, provider.penalty().shape
        (torch.Size([1, 1, 3, 3]), torch.Size([]))
    """

    measured = ("num_layers", "head_size", "num_heads")

    def __init__(
        self,
        num_layers: Depth,
        num_heads: int,
        head_size: int,
        generator_size: int | None = None,
        initial_keep: float = 0.9,
        *,
        price: float = 1.0,
        sampled: bool = True,
    ) -> None:
        super().__init__(num_layers, head_size)
        self.num_heads = whole_number("num_heads", num_heads, most=LARGEST_SIZE)
        self.generator_size = generator_size
        self.initial_keep = inner_probability("initial_keep", initial_keep)
        self.price = not_negative("price", price)
        self.sampled = true_or_false("sampled", sampled)
        size = inner = num_heads * head_size
        if generator_size is not None:
            inner = whole_number("generator_size", generator_size, most=LARGEST_SIZE)
        self.query = nn.ModuleList(_projection(size, inner) for _ in range(self._layers))
        self.key = nn.ModuleList(_projection(size, inner) for _ in range(self._layers))
        self.bias = nn.Parameter(torch.full((self._layers,), math.log(initial_keep / (1 - initial_keep))))

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        layer = self._number_of(site)
        query, key = self._queries_of(site, self.num_heads)
        units = site.units
        if units is not None:  # some models have one mask per head
            units = units.expand(site.shape).any(1, keepdim=True)
        self._seen[layer] = query, key, units
        logits = self.logits(layer, query, key)
        keep = logits.detach() > 0
        if self.sampled:
            uniform = site.uniform(logits.shape, dtype=logits.dtype, by_query=True)
            keep = functional.sample_keep(logits.detach(), uniform=uniform)
        weights = functional.straight_through(keep, torch.sigmoid(logits), reverse=True)
        # Dividing rows by their sum equals dropping scores, except that dropped units have a gradient.
        return Mask(normalized=weights, kept=keep)

    @override
    def penalty(self) -> Tensor | None:
        # Compute the logits again: those of the forward pass have no gradient under gradient checkpointing.
        masked = [
            mean_over(torch.sigmoid(-self.logits(layer, query, key)), units)
            for layer, (query, key, units) in self._seen.items()
        ]
        return self.price * torch.stack(masked).mean() if masked else None

    def logits(self, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """Compute the logits of keeping, ``(B, 1, Q, K)``; layers are counted through all stacks."""
        dtype = self.bias.dtype  # autocast would return a lower precision
        queries, keys = (x.to(dtype).transpose(1, 2).flatten(2) for x in (query, key))
        queries, keys = self.query[layer](queries), self.key[layer](keys)
        scores = (queries / math.sqrt(queries.shape[-1])) @ keys.transpose(-2, -1)
        return scores.unsqueeze(1).to(dtype) + self.bias[layer]


def _projection(size: int, inner: int) -> nn.Linear:
    linear = nn.Linear(size, inner)
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear
