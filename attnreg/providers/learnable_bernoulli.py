"""Learnable Bernoulli dropout: hard masks whose rates are learned from two opposite draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from typing_extensions import override

from attnreg import functional
from attnreg.arguments import not_negative, one_of
from attnreg.errors import InputError
from attnreg.injection import handle_of
from attnreg.injection.undisturbed import undisturbed
from attnreg.masks import AttentionSite, Mask, SiteInfo, Stack
from attnreg.provider.base import MaskProvider
from attnreg.providers._layers import Depth, LayerIndex, depth_of, device_of, found_in, heads_of
from attnreg.providers._rates import Per, initial_logits, logits_at

Placement = Literal["weights", "scores"]
Loss = Callable[[Any, Mapping[str, Any]], Tensor]


class LearnableBernoulli(MaskProvider):
    r"""Dropout of attention whose rate, of each layer or head, is learned; masks are hard, gradients without bias.

    .. math::
        \text{weights: } A = \mathrm{softmax}(S) \odot \frac{1 - d}{1 - p_l}, \qquad
        \text{scores: } S_{ij} = -\infty \text{ if } d_{ij} = 1, \qquad
        d_{ij} \sim \mathrm{Bernoulli}(p_l), \quad p_l = \sigma(\phi_l)

    A hard decision has no gradient. Before each training step, :meth:`attribute` runs the model twice, without
    gradients, under opposite draws from the same noise u, and estimates it (augment-REINFORCE-merge):

    .. math::
        \hat g_l = \big(f([u > \sigma(-\phi)]) - f([u < \sigma(\phi)])\big) \sum_{ij} (u_{ij} - \tfrac{1}{2})

    with f the loss of the batch and the sum over the units of layer l: valid positions of real query rows. Both runs
    have the same dropout of the model's own. The training step draws anew; :meth:`penalty` then adds a term of value 0
    and of gradient :math:`\hat g`, and a reward :math:`-\lambda \sum_l H(p_l)` for the entropy of the rates. What the
    division by :math:`1 - p` contributes to the gradient comes from the training step itself.

    Train with :class:`attnreg.training.TwoPass`, and put the rates into the optimizer:
    ``optimizer.add_param_group({"params": provider.parameters(), "lr": 0.01})``.

    Args:
        num_layers: number of layers of the one stack it acts on, or ``{"encoder": 6, "decoder": 6}``;
            :meth:`for_model` finds out.
        p: the rates before any training, in ``(0, 1)``.
        per: ``"layer"``, or ``"head"`` for each head of each layer.
        num_heads: number of heads, for ``per="head"``.
        placement: ``"weights"`` (after the softmax) or ``"scores"`` (before it).
        regularizer: :math:`\lambda`, in units of the loss.
        loss: f as a function of the model's output and the batch; by default the output's ``loss``. With a function,
            the provider cannot be saved.

    Shape:
        masks are ``(B, H, Q, K)``; :attr:`rates` is ``(layers, 1)`` or ``(layers, H)``.

    Raises:
        ValueError: if an argument is out of range; when attached, if the layers are not those it was made for,
            or another provider looks at batches, too.
        RuntimeError: in a training pass, if :meth:`attribute` was never called.

    Reference:
        Learnable Bernoulli Dropout (arXiv 2002.05155); ARM (arXiv 1807.11143).

    Example:
        >>> import attnreg
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> provider = LearnableBernoulli.for_model(model, p=0.2)
        >>> handle = attnreg.attach(model, provider)
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([1])}
        >>> provider.attribute(model, batch)
        >>> (model(**batch).loss + provider.penalty()).backward()
        >>> provider.logits.grad.shape
        torch.Size([2, 1])
    """

    #: Its own forward passes would use up the masks that other providers keep for the next pass.
    looks_alone = True

    def __init__(
        self,
        num_layers: Depth,
        p: float = 0.1,
        per: Per = "layer",
        num_heads: int | None = None,
        *,
        placement: Placement = "weights",
        regularizer: float = 1e-3,
        loss: Loss | None = None,
    ) -> None:
        super().__init__()
        self._index = LayerIndex("LearnableBernoulli", num_layers)
        self.num_layers = num_layers
        self.logits = initial_logits(self._index, p, per, num_heads)
        self.p = p
        self.per = per
        self.num_heads = num_heads
        self.placement = one_of("placement", placement, ("weights", "scores"))
        self.regularizer = not_negative("regularizer", regularizer)
        if loss is not None and not callable(loss):
            raise InputError(f"Expected `loss` to be a function of the model's output and the batch, got {loss!r}.")
        self.loss = loss
        self._draw: Literal["never", "first", "second", "own"] = "never"
        self._noise: dict[int, Tensor] = {}
        self._estimate: Tensor | None = None

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        p: float = 0.1,
        per: Per = "layer",
        *,
        placement: Placement = "weights",
        regularizer: float = 1e-3,
        loss: Loss | None = None,
        stacks: Sequence[Stack] | None = None,
        example_inputs: Any = None,
    ) -> LearnableBernoulli:
        """A rate for each layer of a model, on its device.

        Args:
            model: any model that can be attached to.
            p: the rates before any training.
            per: ``"layer"`` or ``"head"``.
            placement: ``"weights"`` or ``"scores"``.
            regularizer: weight of the entropy.
            loss: of the model's output and the batch; by default the output's ``loss``.
            stacks: as in :func:`attnreg.attach`.
            example_inputs: as in :func:`attnreg.attach`.

        Raises:
            InputError: if the model has no attention in these stacks, or heads differ in number where rates are theirs.
            NoAttentionError: if no attention is seen in the model.
        """
        found = found_in(model, stacks, example_inputs)
        heads = heads_of(found) if per == "head" else None
        provider = cls(depth_of(found), p, per, heads, placement=placement, regularizer=regularizer, loss=loss)
        return provider.to(device_of(model))

    @property
    def rates(self) -> Tensor:
        """The drop rates as they are now, without a gradient."""
        return self.logits.detach().sigmoid()

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        self._index.check(sites)

    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Run the model twice and estimate the gradient; the next call of :meth:`penalty` hands it on.

        The model's modes, parameters, ``grad`` and the random state are left as they were.

        Args:
            model: the model to which the provider is attached, or what wraps it.
            batch: its keyword arguments.

        Raises:
            RuntimeError: if the provider is not attached to the model.
            InputError: if the model's output has no loss.
        """
        handle = handle_of(model, self)
        model = extract_model_from_parallel(model)
        self._noise, self._estimate = {}, None
        draws: tuple[Literal["first", "second"], ...] = ("first", "second")
        losses = []
        with ExitStack() as stack:
            stack.enter_context(undisturbed(model, training=True))
            stack.enter_context(torch.no_grad())
            stack.enter_context(handle.probing())  # masked, though these passes have no gradients
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            seed = int(torch.randint(2**31, ()))  # other noise than the training step's
            before = self._draw
            try:
                for self._draw in draws:
                    torch.manual_seed(seed)
                    losses.append(self._loss(model(**batch), batch))
            except BaseException:
                self._draw = before
                raise
        self._draw = "own"
        estimate = torch.zeros_like(self.logits)
        first, second = losses
        for layer, noise in self._noise.items():
            estimate[layer] = functional.arm_gradient(first, second, noise).to(estimate)
        self._estimate = estimate

    @override
    def step(self) -> None:
        self._estimate = None

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        if self._draw == "never":
            raise RuntimeError(
                "Expected `provider.attribute(model, batch)` before a training step under LearnableBernoulli, found "
                "it was never called: call it, or train with `attnreg.training.TwoPass`, which does."
            )
        logits = logits_at(self.logits, self._index, site)
        uniform = torch.rand(site.shape, dtype=logits.dtype, device=site.device)
        first, second = functional.opposite_draws(logits.detach(), uniform)
        if self._draw == "first":
            self._note(site, uniform - 0.5)
        keep = ~(first if self._draw == "first" else second)
        if self.placement == "scores":
            return Mask(scores=keep)
        return Mask(weights=keep / torch.sigmoid(-logits), kept=keep)

    @override
    def penalty(self) -> Tensor | None:
        entropy = -self.regularizer * functional.bernoulli_entropy(self.logits).sum()
        if self._estimate is None:
            return entropy
        return entropy + ((self.logits - self.logits.detach()) * self._estimate).sum()

    def _note(self, site: AttentionSite, noise: Tensor) -> None:
        if site.units is not None:
            noise = noise.masked_fill(~site.units, 0.0)
        by_head = noise.sum((0, 2, 3))
        self._noise[self._index(site)] = by_head if self.logits.shape[1] > 1 else by_head.sum(0, keepdim=True)

    def _loss(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        if self.loss is not None:
            return self.loss(output, batch)
        loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise InputError(
                "Expected a model whose output has a `loss` (as transformers' models have when they are given "
                f"`labels`), got {type(output).__name__} without: pass labels, or `loss=` to LearnableBernoulli."
            )
        return loss
