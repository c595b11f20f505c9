"""Regularizers with a small network per layer that reads the queries of a forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, SiteInfo, functional
from attnreg.arguments import LARGEST_SIZE, not_negative, positive, probability, true_or_false, whole_number
from attnreg.functional.attention import per_head
from attnreg.functional.validity import mean_over
from attnreg.regularizers._parts.layers import LARGEST_LOGIT, Depth, LayerwiseProvider, hidden_queries, relaxed_mask


class SeesQueries(LayerwiseProvider):
    """A regularizer that reads queries, and stores the queries of a forward pass, by layer, for its penalty."""

    draws_in_prepare = False  # `prepare` only forgets the latest pass

    def __init__(self, num_layers: Depth, head_size: int) -> None:
        super().__init__(num_layers)
        self.head_size = whole_number("head_size", head_size, most=LARGEST_SIZE)
        self._queries: dict[int, Any] = {}

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        super().check(sites, model)
        for site in sites:
            if site.head_size is None:
                raise hidden_queries(type(self).__name__, site.name)
            if site.head_size != self.head_size:
                raise self._size_error(f"queries of size {self.head_size}", f"{site.name} has size {site.head_size}")

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        self._queries = {}

    @override
    def step(self) -> None:
        self._queries = {}

    def _queries_of(self, site: AttentionSite, heads: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a site's queries and keys, both ``(B, H, ..., D)``, without gradients; ``heads`` is the expected H."""
        if site.query is None or site.key is None:
            raise hidden_queries(type(self).__name__, site.name)
        actual = site.query.shape[1], site.query.shape[-1]
        expected = actual[0] if heads is None else heads, self.head_size
        if actual != expected:
            sizes = f"{expected[0]} heads of size {expected[1]}"
            raise self._size_error(sizes, f"{site.name} has {actual[0]} of size {actual[1]}")
        query, key = site.query.detach(), site.key.detach()
        return query, per_head(key, query.shape[1])


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
        num_layers: Depth = 0,
        num_heads: int = 0,
        head_size: int = 0,
        generator_size: int | None = None,
        initial_keep: float = 0.9,
        *,
        price: float = 1.0,
        sampled: bool = True,
    ) -> None:
        super().__init__(num_layers, head_size)
        self.num_heads = whole_number("num_heads", num_heads, most=LARGEST_SIZE)
        self.generator_size = generator_size
        self.initial_keep = probability("initial_keep", initial_keep, "(0, 1)")
        self.price = not_negative("price", price)
        self.sampled = true_or_false("sampled", sampled)
        size = projected = num_heads * head_size
        if generator_size is not None:
            projected = whole_number("generator_size", generator_size, most=LARGEST_SIZE)
        self.query = nn.ModuleList(_projection(size, projected) for _ in range(self._total_layers))
        self.key = nn.ModuleList(_projection(size, projected) for _ in range(self._total_layers))
        self.bias = nn.Parameter(torch.full((self._total_layers,), math.log(initial_keep / (1 - initial_keep))))

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        layer = self._layer_index(site)
        query, key = self._queries_of(site, self.num_heads)
        units = site.units
        if units is not None:  # some models have one mask per head
            units = units.expand(site.shape).any(1, keepdim=True)
        self._queries[layer] = query, key, units
        logits = self.logits(layer, query, key)
        keep = logits.detach() > 0
        if self.sampled:
            uniform = site.uniform(logits.shape, dtype=logits.dtype, by_query=True)
            keep = functional.sample_keep(logits.detach(), uniform)
        weights = functional.straight_through(keep, torch.sigmoid(logits), reverse=True)
        # Dividing rows by their sum equals dropping scores, except that dropped units have a gradient.
        return Mask(normalized=weights, kept=keep)

    @override
    def penalty(self) -> Tensor | None:
        # Compute the logits again: the forward pass's logits have no gradient under gradient checkpointing.
        masked = [
            mean_over(torch.sigmoid(-self.logits(layer, query, key)), units).to(self.bias.device)
            for layer, (query, key, units) in self._queries.items()
        ]
        return self.price * torch.stack(masked).mean() if masked else None

    def logits(self, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """Compute the logits of keeping, ``(B, 1, Q, K)``; layers are counted through all stacks."""
        dtype = self.bias.dtype  # autocast would return a lower precision
        queries, keys = (x.to(self.bias).transpose(1, 2).flatten(2) for x in (query, key))
        queries, keys = self.query[layer](queries), self.key[layer](keys)
        scores = (queries / math.sqrt(queries.shape[-1])) @ keys.transpose(-2, -1)
        return (scores.unsqueeze(1).to(dtype) + self.bias[layer]).to(query.device)  # layers may be on several devices


def _projection(size: int, projected: int) -> nn.Linear:
    linear = nn.Linear(size, projected)
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear


class ContextualDropout(SeesQueries):
    r"""Drop attention weights at rates that a small network per layer predicts from each query.

    .. math:: \begin{aligned} & \phi_{bhi} = W_2\, \mathrm{LeakyReLU}(W_1 q_{bhi} + b_1) + b_2, \\
        & p = \sigma(\phi), \\ & A_{ij} = \mathrm{softmax}(S)_{ij}\, \frac{1 - z_{ij}}{1 - p_i} \end{aligned}

    z are relaxed drop decisions, as in :class:`attnreg.ConcreteDropout`, drawn for every key at the rate of the query's
    row. The networks learn through the model's loss, in the same optimizer, and ``penalty()``, the mean divergence of
    the rates of real query rows from a prior; no gradient flows into the queries.

    .. math:: \lambda \cdot \mathrm{mean}_{lbhi}\, \mathrm{KL}\big(\mathrm{Bernoulli}(p_{lbhi}) \,\big\|\,
              \mathrm{Bernoulli}(p_0)\big)

    Args:
        num_layers, head_size: L and D of the model; :meth:`for_model` sets them.
        p: initial drop probability, in ``(0, 1)``.
        prior: :math:`p_0`, in ``(0, 1)`` (default: p).
        hidden_size: number of hidden units of a network.
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
        num_layers: Depth = 0,
        head_size: int = 0,
        p: float = 0.1,
        prior: float | None = None,
        hidden_size: int = 8,
        *,
        temperature: float = 0.1,
        regularizer: float = 0.1,
    ) -> None:
        super().__init__(num_layers, head_size)
        self.p = probability("p", p, "(0, 1)")
        self.prior = prior if prior is None else probability("prior", prior, "(0, 1)")
        self.hidden_size = whole_number("hidden_size", hidden_size, most=LARGEST_SIZE)
        self.temperature = positive("temperature", temperature)
        self.regularizer = not_negative("regularizer", regularizer)
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(head_size, hidden_size), nn.LeakyReLU(), _constant(hidden_size, p))
            for _ in range(self._total_layers)
        )

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        layer = self._layer_index(site)
        query, _ = self._queries_of(site)
        self._queries[layer] = query, None if site.units is None else site.units.any(-1, keepdim=True)
        return relaxed_mask(site, self.logits(layer, query).clamp(max=LARGEST_LOGIT), self.temperature)

    @override
    def penalty(self) -> Tensor | None:
        # Predict the rates again: the forward pass's rates have no gradient under gradient checkpointing.
        prior = self.p if self.prior is None else self.prior
        terms = [
            mean_over(functional.bernoulli_kl(self.logits(layer, query), prior), rows)
            for layer, (query, rows) in self._queries.items()
        ]
        return self.regularizer * torch.stack([term.to(terms[0].device) for term in terms]).mean() if terms else None

    def logits(self, layer: int, query: Tensor) -> Tensor:
        """Predict the logits of dropping, ``(B, H, Q, 1)``; layers are counted through all stacks."""
        like = next(self.networks.parameters())
        # Autocast would return a lower precision, and layers may be on several devices.
        return self.networks[layer](query.to(like)).to(query.device, like.dtype)


def _constant(size: int, p: float) -> nn.Linear:
    """Make a last layer that returns the logit of p for any input."""
    linear = nn.Linear(size, 1)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, math.log(p / (1 - p)))
    return linear
