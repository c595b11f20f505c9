"""Dropout of tokens, alone or together with attention weights and blocks (UniDrop)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionDropout, AttentionSite, HiddenDropout, Mask, MaskProvider, OnLayers, SiteInfo, functional
from attnreg.arguments import probability
from attnreg.draws import draws_of_pass
from attnreg.regularizer.base import Container
from attnreg.regularizers.layerdrop import LayerDrop
from attnreg.sites import check_shared_keys


class TokenDropout(MaskProvider):
    r"""Drop random tokens of random sequences, for all layers and heads at once.

    .. math::
        \begin{aligned}
        & \tilde S_{bhqk} = -\infty \text{ if } w_b = 0 \text{ and } m_{bk} = 0, \\
        & w_b \sim \mathrm{Bernoulli}(p_k), \; m_{bk} \sim \mathrm{Bernoulli}(1 - p)
        \end{aligned}

    No query attends to a dropped token; tokens are drawn once per forward pass. The first token of a sequence is never
    dropped, even in padded or packed rows; packed sequences have separate decisions. Dropping is not deleting: the
    dropped token keeps its row, which attends to the others. In an encoder-decoder, cross-attention drops the tokens
    that the encoder drops; the decoder's tokens are drawn separately.

    Args:
        p: probability of dropping a token, in a sequence that is not kept whole.
        keep_whole: :math:`p_k`, the probability of keeping all tokens of a sequence.

    Reference:
        The data dropout of UniDrop (NAACL 2021, arXiv 2104.04946), which deletes the tokens.

    Example:
        >>> provider = TokenDropout(p=1.0, keep_whole=0.0)
        >>> provider(AttentionSite(shape=(1, 4, 3, 3))).scores
        tensor([[[[ True, False, False]]]])
    """

    seed: Tensor
    schedulable = ("p", "keep_whole")

    def __init__(self, p: float = 0.1, keep_whole: float = 0.5) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.keep_whole = probability("keep_whole", keep_whole)
        self.register_buffer("seed", torch.zeros((), dtype=torch.long), persistent=False)

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        check_shared_keys("TokenDropout drops tokens for all queries", sites)

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        self.seed = torch.as_tensor(draws_of_pass().next_seed())

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        is_decoder = site.stack == "decoder"
        known = "tokens", id(self), is_decoder, self.p, self.keep_whole  # rates may differ by layer
        keep = site.once(known, lambda: self._keep(site, is_decoder))
        return Mask(scores=keep)

    def _keep(self, site: AttentionSite, is_decoder: bool) -> Tensor:
        # The numbers follow from the seed, so that all layers and gradient checkpointing get the same decisions.
        seed = functional.fold_seed(self.seed, int(is_decoder))
        rows = torch.arange(site.shape[0], device=site.device)[:, None]
        head, query = torch.zeros(2, dtype=torch.long, device=site.device)
        starts = functional.sequence_starts(site.valid, site.shape, self_attention=site.stack != "cross")
        starts = starts.to(site.device)
        first = starts.int().argmax(1, keepdim=True)  # padding on the left does not count
        columns = torch.arange(site.shape[-1], device=site.device) - first
        keep = functional.uniform_at(seed, rows, head, query, columns) >= self.p
        sequences = starts.cumsum(1).clamp(min=1)  # counted from 1 in every row
        whole = functional.uniform_at(seed, rows, head, query + 1, sequences) < self.keep_whole
        return (keep | whole | starts)[:, None, None]


class UniDrop(Container):
    r"""Drop attention weights, whole blocks and tokens together.

    .. math:: \text{UniDrop} = \underbrace{\text{AttentionDropout}}_{\text{feature}} \;\&\;
        \underbrace{\text{LayerDrop}}_{\text{structure}} \;\&\; \underbrace{\text{TokenDropout}}_{\text{data}}

    Of the paper's four feature dropouts, it does FD-1 (attention weights) and, if ``output`` is above 0, FD-4 (the
    output of the last block of every stack). FD-2 and FD-3 act inside modules, where attnreg cannot reach.

    Args:
        attention: probability p of dropping an attention weight; kept weights are divided by 1 - p.
        block: probability of skipping a block.
        token, keep_whole: p and ``keep_whole`` of :class:`attnreg.TokenDropout`.
        output: probability of dropping a value at the output of the last block; kept values are divided by 1 - p.

    Reference:
        UniDrop (NAACL 2021, arXiv 2104.04946), Section 2.

    Example:
        >>> UniDrop(attention=0.2).together.providers[0]
        AttentionDropout(p=0.2, placement='weights', rescale=True)
    """

    def __init__(
        self,
        attention: float = 0.1,
        block: float = 0.1,
        token: float = 0.1,
        keep_whole: float = 0.5,
        output: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = probability("attention", attention)
        self.block = probability("block", block)
        self.token = probability("token", token)
        self.keep_whole = probability("keep_whole", keep_whole)
        self.together = AttentionDropout(attention) & LayerDrop(block) & TokenDropout(token, keep_whole)
        self.output = probability("output", output)
        if output:
            self.together = self.together & OnLayers(HiddenDropout(output), [-1])
