"""Whole heads dropped: random heads of a sample (DropHead), or a fixed number per layer and step (HeadMask)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo
from attnreg.arguments import Probability, one_of, probability, whole_number
from attnreg.attribution import Target
from attnreg.errors import InputError
from attnreg.outputs import loss_of
from attnreg.regularizers._parts.two_passes import TwoPasses
from attnreg.sites import check_shared_keys


class DropHead(MaskProvider):
    r"""Drop whole attention heads of a sample with probability p and scale up the others.

    .. math:: A_{bh} \leftarrow \xi_{bh} \frac{H}{\sum_{h'} \xi_{bh'}} A_{bh}, \quad
              \xi_{bh} \sim \mathrm{Bernoulli}(1 - p), \quad \xi_b \ne 0

    The factors of a sample sum to H, and a factor is 1 on average. If all heads of a sample would be dropped, one head,
    chosen uniformly, is kept; the paper leaves this case open (H / 0). Its schedule, a rate that falls to 0 and rises
    again, is ``Scheduled(DropHead(), total_steps=T, p=[(0, 0.2), (0.5, 0), (1, 0.2)])``.

    Args:
        p: probability of dropping a head.

    Shape:
        weights are ``(B, H, 1, 1)``.

    Reference:
        Scheduled DropHead: A Regularization Method for Transformer Models (EMNLP Findings 2020, arXiv 2004.13342).

    Example:
        >>> DropHead(1.0)(AttentionSite(shape=(2, 4, 8, 8))).weights.sum(1).flatten()
        tensor([4., 4.])
    """

    schedulable = ("p",)

    def __init__(self, p: Probability = 0.2) -> None:
        super().__init__()
        self.p = probability("p", p)

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        check_shared_keys("DropHead drops a head for all queries of a sample", sites, in_parts=True)
        # It does nothing in a layer of one head, such as the first of a pyramid, but must act in some layer.
        if sites and all(site.heads == 1 for site in sites):
            raise InputError(
                f"Expected several heads for DropHead, which never drops all of a layer, got 1 at {sites[0].name} and "
                "in every other layer: use another regularizer, such as DropKey."
            )

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        return Mask(weights=site.head_factors(self.p)[..., None, None])


By = Literal["random", "importance"]


class HeadMask(TwoPasses, MaskProvider):
    r"""Mask n heads of each layer in each step: random ones or the most important.

    .. math:: A_{bh} \leftarrow \xi_h A_{bh}, \quad \xi_h = 0 \text{ for } n \text{ of the } H \text{ heads, else } 1

    All samples of a batch lose the same heads, and kept heads are not scaled up. ``"random"`` (Mask-Rand) draws all
    sets of n heads with equal probability. ``"importance"`` (Mask-Imp) masks the n heads with the largest

    .. math:: I_h = \Big| \frac{\partial \mathcal L}{\partial \xi_h} \Big|
              = \Big| \sum_{b,q,k} A_{bhqk} \frac{\partial \mathcal L}{\partial A_{bhqk}} \Big|

    on the batch of the training step. This needs a first pass, :meth:`attribute`, as does
    :class:`attnreg.AttributionProvider`. The paper's n counts heads of the whole model.

    Args:
        heads: n, the number of heads to mask per layer, which must have more.
        by: ``"random"`` (random heads) or ``"importance"`` (the heads that the target depends on most).
        target: the score that decides importance: ``"loss"``, which the model returns if the batch has ``labels``, or
            any target of :class:`attnreg.attribution.Target`.

    Shape:
        weights are ``(1, H, 1, 1)``, bool.

    Reference:
        Alleviating the Inequality of Attention Heads (COLING 2022, arXiv 2009.09672); Are Sixteen Heads Really Better
        than One? (NeurIPS 2019, arXiv 1905.10650) for the importance.

    Example:
        >>> HeadMask(3)(AttentionSite(shape=(2, 8, 5, 5))).weights.sum()
        tensor(5)
    """

    decides_for_batch = True

    def __init__(
        self,
        heads: int = 1,
        by: By = "random",
        target: Literal["loss", "predicted", "label"] | Callable[[Any, Mapping[str, Any]], Tensor] = "loss",
    ) -> None:
        super().__init__()
        if target not in ("loss", "predicted", "label") and not callable(target):
            raise InputError(f"Expected `target` to be 'loss', 'predicted', 'label' or a function, got {target!r}.")
        self.heads = whole_number("heads", heads)
        self.by = one_of("by", by, get_args(By))
        self.target = target
        #: Importances ``(H,)`` on the latest batch, by ``"<stack>.<layer>"``.
        self.importances: dict[str, Tensor] = {}

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        for site in sites:
            self._check_heads(site)
        super().check(sites, model)

    def _check_heads(self, site: SiteInfo) -> None:
        if site.heads is not None and self.heads >= site.heads:
            raise InputError(f"Expected `heads` of {site.name} to be below {site.heads}, got {self.heads}.")

    @property
    @override
    def looks_at_batches(self) -> bool:
        return self.by == "importance"

    @property
    @override
    def _score(self) -> Target:
        loss = functools.partial(loss_of, name="another `target` to HeadMask")
        return Target(loss if self.target == "loss" else self.target)

    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Run the first pass of ``by="importance"``; the model's next forward pass in training mode is masked."""
        if self.by != "importance":
            return
        attributions = self._explain(model, batch, method="gradient_times_attention")
        self.importances = {}
        for label, attribution in attributions.items():
            dtype = torch.promote_types(attribution.dtype, torch.float32)
            self.importances[label] = attribution.sum((0, 2, 3), dtype=dtype).abs()

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        if self.looks_at_batches:
            super().prepare(inputs)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        self._check_heads(site)
        heads = site.shape[1]
        if self.by == "random":
            values = site.uniform((heads,))
        elif self._is_masked() and site.label in self.importances:
            values = self.importances[site.label]
        else:
            return None
        keep = torch.ones_like(values, dtype=torch.bool).scatter(0, values.topk(self.heads).indices, False)
        return Mask(weights=keep.view(1, heads, 1, 1))
