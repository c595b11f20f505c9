"""AD-DROP on hidden states: drop the values that a prediction relies on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import Probability, one_of, probability, true_or_false
from attnreg.attribution import Attributions, Target
from attnreg.errors import InputError
from attnreg.functional.region import Region
from attnreg.injection import handle_of
from attnreg.regularizer.providers import HiddenProvider, checked_where
from attnreg.regularizers._parts.two_passes import TwoPasses, check_shape
from attnreg.sites import HiddenInfo, HiddenSite, Where


class HiddenAttributionDropout(HiddenProvider):
    r"""Drop the values of hidden states that the prediction relies on: AD-DROP outside of attention.

    .. math:: \begin{aligned} & a_{btc} = h_{btc}\, \partial s / \partial h_{btc}, \\
        & h'_{btc} = h_{btc} M_{btc} / (1 - q) \text{ in the region, else } h_{btc}, \quad
        M_{btc} \sim \mathrm{Bernoulli}(1 - q) \end{aligned}

    The first pass, ``attribute``, as that of :class:`attnreg.AttributionProvider`, attributes the prediction to the
    hidden states h: to first order, the score s falls by a if the value becomes zero. The region of a token are its p·C
    values with the highest attribution. :class:`attnreg.HiddenDropout`, in contrast, drops any values.

    Args:
        p: share of the values of each token that are candidates.
        q: probability of dropping each candidate.
        region: candidates: ``"high"`` (highest attribution) or ``"low"`` (lowest).
        where: ``"embeddings"``, ``"input"`` or ``"output"`` of each block, ``"pooled"``, or a list of these.
        target: the score s: ``"predicted"``, ``"label"`` or a function; see :class:`attnreg.attribution.Target`.
        rescale: divide kept candidates by :math:`1 - q`.

    Reference:
        AD-DROP (NeurIPS 2022, arXiv 2210.05883) names other units than attention as a possible extension; the choice
        of hidden states, the attribution and the factor are this project's own.

    Example:
        >>> import attnreg
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
        >>> with attnreg.attach(model, HiddenAttributionDropout(where="input")) as handle:
        ...     [site.label for site in handle.sites]
        ['encoder.0.input', 'encoder.1.input']
    """

    schedulable = ("p", "q")

    def __init__(
        self,
        p: Probability = 0.3,
        q: Probability = 0.1,
        region: Region = "high",
        where: Where | Sequence[Where] = "output",
        target: Literal["predicted", "label"] | Callable[[Any, Mapping[str, Any]], Tensor] = "predicted",
        rescale: bool = True,
    ) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.q = probability("q", q)
        self.region = one_of("region", region, get_args(Region))
        self.where = checked_where(where)
        if "residual" in self.places:
            raise InputError(
                "A block has several residual connections, which have no attribution: choose another `where`."
            )
        self.target = Target(target).kind
        self.rescale = true_or_false("rescale", rescale)
        #: Attributions ``(B, T, C)`` of the latest batch, by the label of their site.
        self.attributions = Attributions()
        self._regions: dict[str, Tensor] = {}
        self._passes = TwoPasses()

    draws_in_prepare = True

    @override
    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        sites = handle_of(model, self).sites
        labels = [site.label for site in sites if isinstance(site, HiddenInfo) and site.where in self.places]
        options: dict[str, Any] = {"method": "gradient_times_attention", "target": Target(self.target)}
        self.attributions = self._passes.explain(self, model, batch, labels, **options)
        self._regions = {label: self.attributions.region(label, None, self.p, self.region) for label in labels}

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        self._passes.begin_forward(inputs)

    @override
    def step(self) -> None:
        self._regions = {}
        self._passes.end()

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        self._passes.check(self)
        if not self._passes.masking or site.label not in self._regions:
            return None
        region = self._regions[site.label]
        check_shape(site, region.shape, states.shape)
        factor = site.keep(self.q).to(site.dtype)
        if self.rescale:
            factor = factor / (1 - self.q + (self.q == 1))
        return states * factor.where(region, 1.0)
