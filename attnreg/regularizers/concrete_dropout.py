"""Concrete dropout of attention weights, at drop rates learned together with the model."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from attnreg import AttentionSite, Mask, functional
from attnreg.arguments import not_negative, positive
from attnreg.regularizers._parts.layers import Depth, LearnedRates, Per, relaxed_mask


class ConcreteDropout(LearnedRates):
    r"""Drop attention weights at rates learned per layer or head, with an entropy penalty.

    .. math:: \begin{aligned} & A = \mathrm{softmax}(S) \odot \frac{1 - z}{1 - p}, \\ & z = \sigma\!\left(\frac{1}{t}
        \left(\log\frac{p}{1-p} + \log\frac{u}{1-u}\right)\right), \quad u \sim U(0, 1) \end{aligned}

    Decisions z are relaxed, so that the loss has a gradient with respect to the rates p. On its own, it would mostly
    push them to 0; therefore ``penalty()`` rewards their entropy:

    .. math:: \begin{aligned} & -\lambda \sum_l H(p_l), \\ & H(p) = -p \log p - (1 - p) \log(1 - p) \end{aligned}

    Add the rates to the optimizer, with a learning rate such as 0.01; see :meth:`attnreg.Regularizer.penalty`. Measured
    drop rates count a unit as dropped if z > 1/2, which has probability p.

    Args:
        num_layers: number of layers; by stack, ``{"encoder": 6, "decoder": 6}``. :meth:`for_model` sets it.
        p: initial drop probability, in ``(0, 1)``.
        per: learn one rate per ``"layer"``, or one per ``"head"`` of each layer.
        num_heads: number of heads; required for ``per="head"``.
        temperature: t, the temperature of the relaxation.
        regularizer: :math:`\lambda`, the weight of the entropy, in units of the loss.

    Shape:
        masks are ``(B, H, Q, K)``, float; :attr:`rates` is ``(layers, 1)`` or ``(layers, H)``.

    Reference:
        Concrete Dropout (arXiv 1705.07832), Section 3, without the term of the weight matrix behind the dropout.

    Example:
        >>> provider = ConcreteDropout(num_layers=2, p=0.2)
        >>> mask = provider(AttentionSite(shape=(1, 2, 3, 3), layer=1, num_layers=2))
        >>> (mask.weights.mean() + provider.penalty()).backward()
        >>> provider.logits.grad.shape
        torch.Size([2, 1])
    """

    schedulable = ("temperature",)

    def __init__(
        self,
        num_layers: Depth,
        p: float = 0.1,
        per: Per = "layer",
        num_heads: int | None = None,
        *,
        temperature: float = 0.1,
        regularizer: float = 1e-3,
    ) -> None:
        super().__init__(num_layers, p, per, num_heads)
        self.temperature = positive("temperature", temperature)
        self.regularizer = not_negative("regularizer", regularizer)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        return relaxed_mask(site, self._logits_at(site), self.temperature)

    @override
    def penalty(self) -> Tensor | None:
        return -self.regularizer * functional.bernoulli_entropy(self.logits).sum()
