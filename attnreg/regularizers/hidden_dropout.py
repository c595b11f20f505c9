"""Dropout of hidden states: of single values, of features, or of spans of tokens; with keys (HiddenKey)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor
from typing_extensions import override

from attnreg import DropKey, HiddenProvider, HiddenSite, functional
from attnreg.arguments import Probability, one_of, probability, true_or_false
from attnreg.errors import InputError
from attnreg.regularizer.base import Container
from attnreg.regularizer.providers import checked_where
from attnreg.sites import Where

Mode = Literal["element", "column", "span"]


class HiddenDropout(HiddenProvider):
    r"""Drop values, features or spans of tokens of the hidden states between blocks.

    .. math:: h'_{btc} = h_{btc} M_{btc} / (1 - p), \qquad M_{btc} \sim \mathrm{Bernoulli}(1 - p)

    In mode ``"column"``, all tokens of a sample share M: whole features are dropped. In mode ``"span"``, a share p of
    each sample's tokens is set to zero, one span of neighbouring tokens, and nothing is rescaled. Padding does not
    count. :class:`attnreg.TokenDropout`, in contrast, hides tokens from attention.

    Args:
        p: drop probability; in mode ``"span"``, the share of tokens to drop.
        mode: ``"element"`` (single values), ``"column"`` (features) or ``"span"`` (neighbouring tokens).
        where: ``"embeddings"``, ``"input"`` or ``"output"`` of each block, ``"residual"`` (what each of its residual
            connections adds), ``"pooled"``, or a list of these.
        rescale: divide kept values by :math:`1 - p`; ignored for spans.

    Reference:
        LoRA Meets Dropout under a Unified Framework (arXiv 2403.00812); Fine-tuning with Very Large Dropout (arXiv
        2403.00946): ``where="pooled"``, p = 0.9; LIMA (NeurIPS 2023, arXiv 2305.11206), Section 3:
        ``Scheduled(HiddenDropout(where="residual"), over="depth", p=[(0, 0), (1, 0.3)])``.

    Example:
        >>> import torch
        >>> states = HiddenDropout(0.5, mode="column")(HiddenSite(shape=(1, 3, 4)), torch.ones(1, 3, 4))
        >>> torch.equal(states[:, 0], states[:, 1])
        True
    """

    schedulable = ("p",)

    def __init__(
        self,
        p: Probability = 0.1,
        mode: Mode = "element",
        where: Where | Sequence[Where] = "output",
        rescale: bool = True,
    ) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.mode = one_of("mode", mode, get_args(Mode))
        self.where = checked_where(where)
        self.rescale = true_or_false("rescale", rescale)
        if mode == "span" and "pooled" in self.places:
            raise InputError("The pooled state has no tokens, so it has no spans: use mode='element'.")

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        if self.mode == "span":
            kept = functional.sample_spans(self.p, site.tokens, uniform=site.uniform((site.shape[0], 1)))
            return states * kept.unsqueeze(-1)
        is_column = self.mode == "column" and len(site.shape) == 3
        shape = (site.shape[0], 1, site.shape[2]) if is_column else site.shape
        keep = site.keep(self.p, shape).to(site.dtype)
        return states * (keep / (1 - self.p + (self.p == 1)) if self.rescale else keep)


class HiddenKey(Container):
    r"""Drop whole keys of attention, and single values of hidden states.

    .. math:: \text{HiddenKey} = \underbrace{\text{DropKey, the same keys for all queries}}_{\text{attention}} \;\&\;
        \underbrace{\text{HiddenDropout of elements}}_{\text{hidden states}}

    The paper adds a KL loss between two passes, :class:`attnreg.training.RDrop`; the recipe ``hiddenkey`` has both.

    Args:
        p: probability of dropping a key, and of dropping a value.

    Reference:
        LoRA Meets Dropout under a Unified Framework (ACL Findings 2024, arXiv 2403.00812). It drops the hidden states
        of the feed-forward part; here, they are those at the output of each block.

    Example:
        >>> HiddenKey(0.2).together.providers[0]
        DropKey(p=0.2, share_heads=False, share_queries=True)
    """

    def __init__(self, p: Probability = 0.1) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.together = DropKey(p, share_queries=True) & HiddenDropout(p)
