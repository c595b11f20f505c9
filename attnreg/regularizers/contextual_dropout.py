"""Contextual dropout of attention weights, at rates that small networks predict from each query."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, functional
from attnreg.arguments import LARGEST_SIZE, inner_probability, not_negative, positive, whole_number
from attnreg.functional.validity import mean_over
from attnreg.regularizers._parts.layers import LARGEST_LOGIT, Depth, SeesQueries, relaxed_mask


class ContextualDropout(SeesQueries):
    r"""Drop attention weights at rates that a small network per layer predicts from each query.

    .. math:: \begin{aligned} & \phi_{bhi} = W_2\, \mathrm{LeakyReLU}(W_1 q_{bhi} + b_1) + b_2, \\
        & p = \sigma(\phi), \\ & A_{ij} = \mathrm{softmax}(S)_{ij}\, \frac{1 - z_{ij}}{1 - p_i} \end{aligned}

    z are relaxed drop decisions, as in :class:`attnreg.ConcreteDropout`, drawn for each key at the rate of the query's
    row. The networks learn through the model's loss, in the same optimizer, and ``penalty()``, the mean divergence of
    the rates of real query rows from a prior; no gradient flows into the queries.

    .. math:: \lambda \cdot \mathrm{mean}_{lbhi}\, \mathrm{KL}\big(\mathrm{Bernoulli}(p_{lbhi}) \,\big\|\,
              \mathrm{Bernoulli}(p_0)\big)

    Args:
        num_layers, head_size: L and D of the model; :meth:`for_model` sets them.
        p: initial drop probability, in ``(0, 1)``.
        prior: :math:`p_0`, in ``(0, 1)`` (default: p).
        hidden_size: number of hidden units of each network.
        temperature: temperature of the relaxation.
        regularizer: :math:`\lambda`, the weight of the divergence, in units of the loss.

    Shape:
        masks are ``(B, H, Q, K)``, float; rates ``(B, H, Q, 1)``.

    Reference:
        Contextual Dropout (ICLR 2021, arXiv 2103.04181).

    Example:
        >>> provider = ContextualDropout(num_layers=2, head_size=4, p=0.2)
        >>> query = key = torch.randn(1, 2, 3, 4)
        >>> mask = provider(AttentionSite(shape=(1, 2, 3, 3), layer=1, num_layers=2, query=query, key=key))
        >>> mask.weights.shape, provider.penalty().shape
        (torch.Size([1, 2, 3, 3]), torch.Size([]))
    """

    measured = ("num_layers", "head_size")
    schedulable = ("temperature",)

    def __init__(
        self,
        num_layers: Depth,
        head_size: int,
        p: float = 0.1,
        prior: float | None = None,
        hidden_size: int = 8,
        *,
        temperature: float = 0.1,
        regularizer: float = 0.1,
    ) -> None:
        super().__init__(num_layers, head_size)
        self.p = inner_probability("p", p)
        self.prior = prior if prior is None else inner_probability("prior", prior)
        self.hidden_size = whole_number("hidden_size", hidden_size, most=LARGEST_SIZE)
        self.temperature = positive("temperature", temperature)
        self.regularizer = not_negative("regularizer", regularizer)
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(head_size, hidden_size), nn.LeakyReLU(), _constant(hidden_size, p))
            for _ in range(self._layers)
        )

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        layer = self._number_of(site)
        query, _ = self._queries_of(site)
        self._seen[layer] = query, None if site.units is None else site.units.any(-1, keepdim=True)
        return relaxed_mask(site, self.logits(layer, query).clamp(max=LARGEST_LOGIT), self.temperature)

    @override
    def penalty(self) -> Tensor | None:
        # Predict the rates again: those of the forward pass have no gradient under gradient checkpointing.
        prior = self.p if self.prior is None else self.prior
        terms = [
            mean_over(functional.bernoulli_kl(self.logits(layer, query), prior), rows)
            for layer, (query, rows) in self._seen.items()
        ]
        return self.regularizer * torch.stack(terms).mean() if terms else None

    def logits(self, layer: int, query: Tensor) -> Tensor:
        """Predict the logits of dropping, ``(B, H, Q, 1)``; layers are counted through all stacks."""
        dtype = next(self.networks.parameters()).dtype  # autocast would return a lower precision
        return self.networks[layer](query.to(dtype)).to(dtype)


def _constant(size: int, p: float) -> nn.Linear:
    """A last layer that returns the logit of p for any input."""
    linear = nn.Linear(size, 1)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, math.log(p / (1 - p)))
    return linear
