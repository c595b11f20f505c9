"""Dropout of hidden states: of any values, features or spans, with keys, or where attention or attribution is high."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, DropKey, HiddenProvider, HiddenSite, Mask, MaskProvider, SiteInfo, functional
from attnreg.arguments import Probability, one_of, positive, probability
from attnreg.attribution import Attributions
from attnreg.errors import InputError
from attnreg.injection import handle_of
from attnreg.regularizer.base import Container
from attnreg.regularizer.providers import checked_where
from attnreg.regularizers._parts.two_passes import TwoPasses, check_shape
from attnreg.sites import HiddenInfo, Where

Mode = Literal["element", "column", "span"]


class HiddenDropout(HiddenProvider):
    r"""Drop values, features or spans of tokens of the hidden states between blocks.

    .. math:: h'_{btc} = h_{btc} M_{btc} / (1 - p), \qquad M_{btc} \sim \mathrm{Bernoulli}(1 - p)

    In mode ``"column"``, all tokens of a sample share M: whole features are dropped. In mode ``"span"``, a share p of
    a sample's tokens is set to zero, one span of neighbouring tokens, and nothing is rescaled. Padding does not
    count. :class:`attnreg.TokenDropout`, in contrast, hides tokens from attention.

    Args:
        p: drop probability; in mode ``"span"``, the share of tokens to drop.
        mode: ``"element"`` (single values), ``"column"`` (features) or ``"span"`` (neighbouring tokens).
        where: ``"embeddings"``, ``"input"`` or ``"output"`` of a block, ``"residual"`` (what its residual
            connections add), ``"pooled"``, or a list of these.

    Reference:
        LoRA Meets Dropout under a Unified Framework (arXiv 2403.00812); Fine-tuning with Very Large Dropout (arXiv
        2403.00946): ``where="pooled"``, p = 0.9; LIMA (NeurIPS 2023, arXiv 2305.11206), Section 3:
        ``Scheduled(HiddenDropout(where="residual"), over="depth", p=[(0, 0), (1, 0.3)])``.

    Example:
        >>> states = HiddenDropout(0.5, mode="column")(HiddenSite(shape=(1, 3, 4)), torch.ones(1, 3, 4))
        >>> torch.equal(states[:, 0], states[:, 1])
        True
    """

    schedulable = ("p",)

    def __init__(self, p: Probability = 0.1, mode: Mode = "element", where: Where | Sequence[Where] = "output") -> None:
        super().__init__()
        self.p = probability("p", p)
        self.mode = one_of("mode", mode, get_args(Mode))
        self.where = checked_where(where)
        if mode == "span" and "pooled" in self.places:
            raise InputError("The pooled state has no tokens, so it has no spans: use mode='element'.")

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        if self.mode == "span":
            kept = functional.sample_spans(self.p, site.tokens, site.uniform((site.shape[0], 1)))
            return states * kept.unsqueeze(-1)
        is_column = self.mode == "column" and len(site.shape) == 3
        return site.dropout(states, self.p, (site.shape[0], 1, site.shape[2]) if is_column else None)


class HiddenKey(Container):
    r"""Drop whole keys of attention, and single values of hidden states.

    .. math::
        \begin{aligned}
        & \text{HiddenKey} = \underbrace{\text{DropKey, the same keys for all queries}}_{\text{attention}} \\
        & \quad \&\; \underbrace{\text{HiddenDropout of elements}}_{\text{hidden states}}
        \end{aligned}

    The paper adds a KL loss between two passes, :class:`attnreg.training.RDropLoss`; the recipe ``hiddenkey`` has both.

    Args:
        p: probability of dropping a key, and of dropping a value.

    Reference:
        LoRA Meets Dropout under a Unified Framework (ACL Findings 2024, arXiv 2403.00812). It drops the hidden states
        of the feed-forward part, this class the states at the output of a block.

    Example:
        >>> HiddenKey(0.2).together.providers[0]
        DropKey(p=0.2, share_heads=False, share_queries=True)
    """

    def __init__(self, p: Probability = 0.1) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.together = DropKey(p, share_queries=True) & HiddenDropout(p)


class HiddenCut(HiddenProvider):
    r"""Drop a span of each block's output, which begins at a token that receives much attention in this block.

    .. math:: \begin{aligned} & r_{bj} = \operatorname*{mean}_{h, i} A_{bhij}, \\
        & s_b \sim U(\text{the } \lceil c\, n_b \rceil \text{ tokens of the highest } r_{bj}) \end{aligned}

    As in :class:`attnreg.HiddenDropout`, the span has a share p of the :math:`n_b` tokens of sample b; it begins
    earlier than :math:`s_b` if it would not fit otherwise. A is the model's self-attention before masks and dropout,
    computed once more, without gradients; its mean is over heads and over queries that are not padding.

    Args:
        p: the share of tokens to drop.
        candidates: c, the share of tokens at which a span may begin.

    Raises:
        InputError: when attached, if attention is computed in parts; in a forward pass, if padding is unknown.

    Reference:
        HiddenCut (Chen et al., ACL 2021, arXiv 2106.00149), without its loss between passes with and without cuts.

    Example:
        >>> provider = HiddenCut(p=0.5, candidates=0.25)
        >>> scores = torch.tensor([0.0, 0.0, 9.0, 0.0]).expand(1, 1, 4, 4)
        >>> _ = provider.attention(AttentionSite(shape=(1, 1, 4, 4), written_scores=scores))
        >>> provider(HiddenSite(shape=(1, 4, 1)), torch.ones(1, 4, 1)).flatten()
        tensor([1., 1., 0., 0.])
    """

    where = "output"
    schedulable = ("p",)

    def __init__(self, p: Probability = 0.1, candidates: float = 0.4) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.candidates = positive("candidates", probability("candidates", candidates))
        self.attention = _ReceivedAttention()

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if in_parts := [site.name for site in sites if site.in_parts]:
            raise InputError(
                f"HiddenCut needs the whole attention at once, but {in_parts[0]} computes it in parts (per image or "
                "window). Leave it out with `modules=...` or `layers=...`, or use HiddenDropout(mode='span')."
            )

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        received = self.attention.received.pop(f"{site.stack}.{site.layer}", None)
        if received is None or received.shape != site.shape[:2]:
            raise InputError(
                f"HiddenCut saw no attention between the tokens of {site.name}: attach it to layers that have it, "
                "or use HiddenDropout(mode='span')."
            )
        tokens = site.tokens
        starts = functional.candidate_region(received, tokens, self.candidates)
        kept = functional.sample_spans(self.p, tokens, site.uniform((site.shape[0], 1)), starts=starts)
        return states * kept.unsqueeze(-1)


class _ReceivedAttention(MaskProvider):
    """Masks nothing, and stores the attention that every key receives: the mean over heads, the sum over queries."""

    draws_in_prepare = False  # `prepare` only forgets the latest pass

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, Tensor] = {}  # (B, K), by attention site, until its block ends

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        self.received = {}

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        if site.stack != "cross":
            with torch.no_grad():
                weights = site.scores().softmax(-1).nan_to_num(0.0)  # a row without a valid key
                if (units := site.units) is not None:
                    weights = weights * units.any(-1, keepdim=True)
                self.received[site.label] = weights.mean(1).sum(1)
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "received": {}}


class HiddenAttributionDropout(TwoPasses, HiddenProvider):
    r"""Drop the values of hidden states that the prediction relies on: AD-DROP outside of attention.

    .. math::
        \begin{aligned}
        & a_{btc} = h_{btc}\, \partial s / \partial h_{btc}, \\
        & h'_{btc} = h_{btc} M_{btc} / (1 - q) \text{ in the region, else } h_{btc}, \\
        & M_{btc} \sim \mathrm{Bernoulli}(1 - q)
        \end{aligned}

    The first pass, ``attribute``, as in :class:`attnreg.AttributionProvider`, attributes the prediction to the hidden
    states h: to first order, the score s falls by a if the value becomes zero. The region of a token is its p·C values
    with the highest attribution. :class:`attnreg.HiddenDropout`, in contrast, drops any values.

    Args:
        p: share of the values of a token that are candidates.
        q: probability of dropping a candidate.
        where: ``"embeddings"``, ``"input"`` or ``"output"`` of a block, ``"pooled"``, or a list of these.

    Reference:
        AD-DROP (NeurIPS 2022, arXiv 2210.05883) names other units than attention as a possible extension; the choice
        of hidden states, the attribution and the factor are this project's.

    Example:
        >>> import attnreg
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
        >>> with attnreg.attach(model, HiddenAttributionDropout(where="input")) as handle:
        ...     [site.label for site in handle.sites]
        ['encoder.0.input', 'encoder.1.input']
    """

    schedulable = ("p", "q")

    def __init__(self, p: Probability = 0.3, q: Probability = 0.1, where: Where | Sequence[Where] = "output") -> None:
        super().__init__()
        self.p = probability("p", p)
        self.q = probability("q", q)
        self.where = checked_where(where)
        if "residual" in self.places:
            raise InputError("A block has several residual connections, without attribution: choose another `where`.")
        #: Attributions ``(B, T, C)`` of the latest batch, by the label of the site.
        self.attributions = Attributions()

    @override
    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        sites = handle_of(model, self).sites
        self._labels = [site.label for site in sites if isinstance(site, HiddenInfo) and site.where in self.places]
        self.attributions = self._explain(model, batch, method="gradient_times_attention")

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        if not self._is_masked() or site.label not in self._labels:
            return None
        check_shape(site, self.attributions.shapes[site.label], states.shape)
        region = self.attributions.region(site.label, None, self.p, "high")
        factor = site.keep(self.q).to(site.dtype) / (1 - self.q + (self.q == 1))
        return states * factor.where(region, 1.0)
