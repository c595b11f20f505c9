"""Dropout of attention weights or scores at rates that are learned per layer or head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.compiler import set_stance
from typing_extensions import override

from attnreg import AttentionSite, Mask, SiteInfo, functional
from attnreg.arguments import a_function, not_negative, one_of, positive, probability, whole_number
from attnreg.errors import InputError
from attnreg.injection import draws_repeated, handle_of, undisturbed
from attnreg.outputs import LossFunction, a_batch, loss_of
from attnreg.regularizers._parts.layers import LARGEST_LOGIT, Depth, LayerwiseProvider, depth_of, relaxed_mask
from attnreg.regularizers._parts.two_passes import never_attributed

Per = Literal["layer", "head"]


class LearnedRates(LayerwiseProvider):
    """A regularizer with a learned drop rate per layer or head, whose entropy is rewarded."""

    measured = ("num_layers", "num_heads")

    def __init__(self, num_layers: Depth, p: float, per: Per, num_heads: int | None, regularizer: float) -> None:
        super().__init__(num_layers)
        p = probability("p", p, "(0, 1)")
        if (one_of("per", per, get_args(Per)) == "head") is (num_heads is None):
            raise InputError(f"Expected `num_heads` with `per` 'head', and only then, got {num_heads} with {per!r}.")
        shape = self._total_layers, 1 if num_heads is None else whole_number("num_heads", num_heads)
        self.logits = nn.Parameter(torch.full(shape, math.log(p / (1 - p))))  # logits of dropping
        self.p = p
        self.per = per
        self.num_heads = num_heads
        self.regularizer = not_negative("regularizer", regularizer)
        self._rewarded: Sequence[int] | None = None  # the layers whose entropy counts, if not all of them

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        super().check(sites, model)
        # Rates that mask nothing would only follow the reward, to 0.5.
        layers = sorted({self._layer_index(site) for site in sites})
        self._rewarded = layers if len(layers) < self._total_layers else None

    @classmethod
    @override
    def measure(cls, sites: Sequence[SiteInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        by_head = options.get("per") == "head"
        return super().measure(sites, options) if by_head else {"num_layers": depth_of(sites), "num_heads": None}

    @property
    def rates(self) -> Tensor:
        """The current drop rates, without gradients."""
        return self.logits.detach().sigmoid()

    @override
    def penalty(self) -> Tensor:
        logits = self.logits if self._rewarded is None else self.logits[self._rewarded]
        return -self.regularizer * functional.bernoulli_entropy(logits).sum()

    def _logits_at(self, site: AttentionSite) -> Tensor:
        """Return the logits of a site, broadcastable to ``(B, H, Q, K)``."""
        if self.logits.shape[1] not in (1, site.shape[1]):
            raise self._size_error(f"{self.logits.shape[1]} heads", f"{site.name} has {site.shape[1]}")
        return self.logits[self._layer_index(site)].to(site.device).clamp(max=LARGEST_LOGIT).view(-1, 1, 1)


class ConcreteDropout(LearnedRates):
    r"""Drop attention weights at rates learned per layer or head, with an entropy penalty.

    .. math:: \begin{aligned} & A = \mathrm{softmax}(S) \odot \frac{1 - z}{1 - p}, \\ & z = \sigma\!\left(\frac{1}{t}
        \left(\log\frac{p}{1-p} + \log\frac{u}{1-u}\right)\right), \quad u \sim U(0, 1) \end{aligned}

    Decisions z are relaxed, so that the loss has a gradient with respect to the rates p. It alone would mostly push the
    rates to 0; therefore ``penalty()`` rewards their entropy:

    .. math:: \begin{aligned} & -\lambda \sum_l H(p_l), \\ & H(p) = -p \log p - (1 - p) \log(1 - p) \end{aligned}

    Once attached, the sum runs over the layers on which it acts. Add the rates to the optimizer, with a learning rate
    such as 0.01; see :meth:`attnreg.Regularizer.penalty`. Measured drop rates count a unit as dropped if z > 1/2, which
    has probability p.

    Args:
        num_layers: number of layers; by stack, ``{"encoder": 6, "decoder": 6}``. :meth:`for_model` sets it.
        p: initial drop probability, in ``(0, 1)``.
        per: learn one rate per ``"layer"``, or one per ``"head"`` of a layer.
        num_heads: number of heads; for ``per="head"`` only.
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
        num_layers: Depth = 0,
        p: float = 0.1,
        per: Per = "layer",
        num_heads: int | None = None,
        *,
        temperature: float = 0.1,
        regularizer: float = 1e-3,
    ) -> None:
        super().__init__(num_layers, p, per, num_heads, regularizer)
        self.temperature = positive("temperature", temperature)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        return relaxed_mask(site, self._logits_at(site), self.temperature)


Placement = Literal["weights", "scores"]


class LearnableBernoulli(LearnedRates):
    r"""Drop attention weights or scores with hard masks, at rates learned per layer or head.

    .. math:: \begin{aligned} & \text{weights: } A = \mathrm{softmax}(S) \odot \frac{1 - d}{1 - p_l}, \\
        & \text{scores: } S_{ij} = -\infty \text{ if } d_{ij} = 1, \\
        & d_{ij} \sim \mathrm{Bernoulli}(p_l), \quad p_l = \sigma(\phi_l) \end{aligned}

    A hard decision has no gradient. Therefore, before every training step, :meth:`attribute` runs the model twice under
    opposite draws from the same noise u, and estimates the gradient without bias (augment-REINFORCE-merge):

    .. math:: \hat g_l = \big(f([u > \sigma(-\phi)]) - f([u < \sigma(\phi)])\big) \sum_{ij} (u_{ij} - \tfrac{1}{2})

    f is the loss of the batch; the sum runs over the units of layer l, the valid positions of real query rows. The
    model's dropout is the same in both runs. The training step draws new masks; ``penalty()`` then adds a term
    with value 0 and gradient :math:`\hat g`, and a reward :math:`-\lambda \sum_l H(p_l)` for the entropy of the rates.

    Args:
        num_layers, p, per, num_heads: as in :class:`attnreg.ConcreteDropout`; the optimizer needs the rates, too.
        placement: what to drop: ``"weights"`` (after the softmax) or ``"scores"`` (before it).
        regularizer: :math:`\lambda`, the weight of the entropy, in units of the loss.
        loss: f as a function of the model's output and the batch (default: the output's ``loss``). A regularizer with a
            function cannot be saved.

    Shape:
        masks are ``(B, H, Q, K)``; :attr:`rates` is ``(layers, 1)`` or ``(layers, H)``.

    Raises:
        InputError: when attached, if another regularizer looks at batches, too.
        RuntimeError: in a training pass, if :meth:`attribute` was never called.

    Reference:
        Learnable Bernoulli Dropout (arXiv 2002.05155); ARM (arXiv 1807.11143).

    Example:
        >>> import attnreg
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
        >>> provider = LearnableBernoulli.for_model(model, p=0.2)
        >>> handle = attnreg.attach(model, provider)
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([1])}
        >>> provider.attribute(model, batch)
        >>> (model(**batch).loss + provider.penalty()).backward()
        >>> provider.logits.grad.shape
        torch.Size([2, 1])
    """

    #: Its forward passes would take the masks that other regularizers keep for the training step.
    looks_alone = True

    def __init__(
        self,
        num_layers: Depth = 0,
        p: float = 0.1,
        per: Per = "layer",
        num_heads: int | None = None,
        *,
        placement: Placement = "weights",
        regularizer: float = 1e-3,
        loss: LossFunction | None = None,
    ) -> None:
        super().__init__(num_layers, p, per, num_heads, regularizer)
        self.placement = one_of("placement", placement, get_args(Placement))
        self.loss = None if loss is None else a_function("loss", loss, "the model's output and the batch")
        self.uses_model_loss = loss is None
        self._draw = "never"  # then "first" and "second", the opposite draws of `attribute`, and "training"
        self._noise: dict[int, Tensor] = {}
        self._estimate: Tensor | None = None

    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Run the model twice and estimate the gradient, which ``penalty()`` then passes on."""
        handle = handle_of(model, self)
        model = extract_model_from_parallel(model)
        self._noise, self._estimate = {}, None
        losses = []
        # Within `probing`, these passes are masked, too, although they have no gradients.
        with undisturbed(model, training=True), torch.no_grad(), handle.probing(), set_stance("force_eager"):
            torch.manual_seed(int(torch.randint(2**31, ())))  # other noise than in the training step
            previous = self._draw
            try:
                for self._draw in ("first", "second"):
                    with draws_repeated(model):
                        output = model(**a_batch(model, batch))
                        losses.append(loss_of(output, batch, self.loss, "`loss` to LearnableBernoulli"))
            except BaseException:
                self._draw = previous
                raise
        torch.clear_autocast_cache()  # torch 2.9 keeps casts of weights without gradients, under a Trainer's autocast
        self._draw = "training"
        self._estimate = torch.zeros_like(self.logits)
        gap = (losses[0] - losses[1]).nan_to_num(0.0, 0.0, 0.0)  # a batch without labels has no loss
        for layer, noise in self._noise.items():
            self._estimate[layer] = (gap.to(noise.device) * noise).to(self.logits)  # layers may be on several devices

    @override
    def step(self) -> None:
        self._estimate = None

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        if self._draw == "never":
            raise never_attributed(self)
        logits = self._logits_at(site)
        uniform = site.uniform(dtype=logits.dtype)
        phi = logits.detach()
        first, second = uniform > torch.sigmoid(-phi), uniform < torch.sigmoid(phi)
        if self._draw == "first":
            noise = uniform - 0.5 if site.units is None else (uniform - 0.5).masked_fill(~site.units, 0.0)
            dims = (0, 2, 3) if self.logits.shape[1] > 1 else (0, 1, 2, 3)
            self._noise[self._layer_index(site)] = noise.sum(dims).view(-1)
        keep = ~(first if self._draw == "first" else second)
        if self.placement == "scores":
            return Mask(scores=keep)
        return Mask(weights=keep / torch.sigmoid(-logits), kept=keep)

    @override
    def penalty(self) -> Tensor:
        if self._estimate is None:
            return super().penalty()
        return super().penalty() + ((self.logits - self.logits.detach()) * self._estimate).sum()
