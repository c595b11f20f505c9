"""AD-DROP: drop attention positions that a prediction relies on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import Count, Probability, one_of, probability, whole_number
from attnreg.attribution import Attributions, Target
from attnreg.functional.region import Region
from attnreg.masks import Mask
from attnreg.regularizer.providers import MaskProvider
from attnreg.regularizers._parts.two_passes import TwoPasses, check_shape
from attnreg.sites import AttentionSite, SiteInfo, layer_indices, on_layers

Method = Literal["gradient", "integrated_gradients", "attention", "random"]
FirstPass = Literal["eval", "train"]
HalfPrecision = Literal["bfloat16", "float16"]


class AttributionProvider(TwoPasses, MaskProvider):
    r"""Drop attention positions that the prediction relies on (AD-DROP), in two passes per step.

    The first pass, :meth:`attribute`, attributes the model's prediction to its attention weights A and updates nothing.
    In a row (sample, head, query) of n valid keys, the p·n keys with the highest attribution are the candidate region.
    The next forward pass drops every candidate with probability q:

    .. math:: \tilde S_{ij} = -\infty \text{ if } M_{ij} = 0, \quad
              M_{ij} \sim \mathrm{Bernoulli}(1 - q) \text{ in the region, else } 1

    The masks last until the end of the backward pass, also under gradient checkpointing; later passes are not masked
    until the next :meth:`attribute`.
    The gradients of fused attention :math:`O = A V` are :math:`(\partial s / \partial O) V^\top`, without A in memory.
    With ``method="random"`` there is no first pass, and every forward pass in training mode is masked. ``target`` may
    also be a function: see :class:`attnreg.attribution.Target`.

    Args:
        p: share of the valid keys of a query that are candidates.
        q: probability of dropping a candidate.
        method: attribution method: ``"gradient"`` (GA), ``"integrated_gradients"`` (IGA), ``"attention"`` (AA, the
            weights) or ``"random"`` (RD, no first pass).
        region: candidate keys: ``"high"`` (highest attribution) or ``"low"`` (lowest attribution).
        layers: layer indices; negative ones count from the last layer (default: all attached layers).
        target: score to explain: ``"predicted"`` (of the predicted class) or ``"label"`` (of the gold class).
        steps: steps of integrated gradients; only for that method.
        first_pass: mode of the first pass: ``"eval"`` (no dropout) or ``"train"`` (dropout, as in the official code; a
            layer that the model skips there is not masked).
        first_pass_dtype: autocast of the first pass: ``"bfloat16"`` or ``"float16"`` (default: as the training step).
            It warns once on a CPU where products in it are slower than in float32.

    Reference:
        AD-DROP: Attribution-Driven Dropout for Robust Language Model Fine-Tuning (NeurIPS 2022, arXiv 2210.05883),
        Section 2, and its official code.

    Example:
        >>> import attnreg
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> provider = AttributionProvider(p=0.5, q=0.5)
        >>> handle = attnreg.attach(model, provider)
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([1])}
        >>> provider.attribute(model, batch)
        >>> model(**batch).loss.backward()
        >>> provider.attributions["encoder.1"].shape
        torch.Size([1, 2, 4, 4])
    """

    schedulable = ("p", "q")

    def __init__(
        self,
        p: Probability = 0.3,
        q: Probability = 0.1,
        method: Method = "gradient",
        region: Region = "high",
        layers: Sequence[int] | None = None,
        target: Literal["predicted", "label"] | Callable[[Any, Mapping[str, Any]], Tensor] = "predicted",
        steps: Count = 20,
        first_pass: FirstPass = "eval",
        first_pass_dtype: HalfPrecision | None = None,
    ) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.q = probability("q", q)
        self.method = one_of("method", method, get_args(Method))
        self.region = one_of("region", region, get_args(Region))
        self.layers = None if layers is None else layer_indices(layers, "AttributionProvider")
        self.target = Target(target).kind
        self.steps = whole_number("steps", steps)
        self.first_pass = one_of("first_pass", first_pass, get_args(FirstPass))
        self.first_pass_dtype = first_pass_dtype
        if first_pass_dtype is not None:
            one_of("first_pass_dtype", first_pass_dtype, get_args(HalfPrecision))
        #: Attributions ``(B, H, Q, K)`` of the latest batch, by ``"<stack>.<layer>"``; an access may compute them.
        self.attributions = Attributions()

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        chosen = sites if self.layers is None else on_layers(sites, self.layers, "AttributionProvider")
        super().check(chosen, model)

    @property
    @override
    def looks_at_batches(self) -> bool:
        return self.method != "random"

    @property
    @override
    def _score(self) -> Target:
        return Target(self.target)

    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Run the first pass; the model's next forward pass in training mode, on the same batch, is masked.

        The model's modes, ``requires_grad``, ``grad``, hooks and the random state stay as they are; see
        :meth:`attnreg.Regularizer.attribute`.
        """
        self.clear()
        if self.method == "random":
            return
        dtype = None if self.first_pass_dtype is None else getattr(torch, self.first_pass_dtype)
        training = self.first_pass == "train"
        self.attributions = self._explain(
            model, batch, method=self.method, steps=self.steps, training=training, dtype=dtype
        )

    def clear(self) -> None:
        """Forget the attributions, so that the next forward pass is not masked."""
        self.attributions = Attributions()
        self.step()

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        if self.method == "random":
            self._mask_next_pass({})  # any inputs, because there is no first pass
        super().prepare(inputs)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        if not self._is_masked() or site.label not in self._labels:
            return None
        if self.method == "random":
            self.attributions[site.label] = site.uniform()
        elif site.label not in self.attributions.shapes:
            return None  # the model itself skipped this layer in the first pass
        check_shape(site, self.attributions.shapes[site.label], site.shape)
        # Computed in every call: selective checkpointing must meet the same operations again.
        region = self.attributions.region(site.label, site.valid, self.p, self.region)
        return Mask(scores=region <= site.keep(self.q))  # keep | ~region, in one operation
