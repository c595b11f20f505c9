"""Names of 0.1.0, which warn, make the class that replaces them, and go in 0.3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import Seq2SeqTrainer
from typing_extensions import deprecated

from attnreg.injection import AttachHandle
from attnreg.integrations.trainer import RegularizedTrainer
from attnreg.regularizer.base import Regularizer
from attnreg.regularizers.ad_drop import ADDrop
from attnreg.training.cross_entropy import CrossEntropy
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.several_passes import NoiseKind, R3FLoss, RDropLoss


class _WithADDrop(RegularizedTrainer):
    def __init__(self, *args: Any, provider: Regularizer | AttachHandle | None = None, **kwargs: Any) -> None:
        super().__init__(*args, provider=ADDrop() if provider is None else provider, **kwargs)


@deprecated("ADDropTrainer goes in 0.3: use RegularizedTrainer(..., provider=ADDrop()).")
class ADDropTrainer(_WithADDrop):
    """:class:`attnreg.integrations.RegularizedTrainer`, by default with AD-DROP."""


@deprecated("Seq2SeqADDropTrainer goes in 0.3: derive a class from RegularizedTrainer and Seq2SeqTrainer.")
class Seq2SeqADDropTrainer(_WithADDrop, Seq2SeqTrainer):
    """:class:`attnreg.integrations.RegularizedTrainer` on top of :class:`transformers.Seq2SeqTrainer`."""


@deprecated("RDropTrainer goes in 0.3: use RegularizedTrainer(..., objective=RDropLoss(alpha)).")
class RDropTrainer(RegularizedTrainer):
    """:class:`attnreg.integrations.RegularizedTrainer` with the loss of R-Drop."""

    def __init__(self, *args: Any, alpha: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, objective=RDropLoss(alpha), **kwargs)


@deprecated("TwoPass goes in 0.3: use FineTuning, which makes the first pass of AD-DROP, too.")
class TwoPass(FineTuning):
    """:class:`attnreg.training.FineTuning`."""


@deprecated("RDrop goes in 0.3: use FineTuning(..., objective=RDropLoss(alpha)).")
class RDrop(FineTuning):
    """:class:`attnreg.training.FineTuning` with the loss of R-Drop."""

    def __init__(self, *args: Any, alpha: float = 1.0, **shared: Any) -> None:
        super().__init__(*args, **{**shared, "objective": RDropLoss(alpha)})


@deprecated("R3F goes in 0.3: use FineTuning(..., objective=R3FLoss(weight, eps, noise)).")
class R3F(FineTuning):
    """:class:`attnreg.training.FineTuning` with the loss of R3F."""

    def __init__(
        self, *args: Any, weight: float = 1.0, eps: float = 1e-5, noise: NoiseKind = "uniform", **shared: Any
    ) -> None:
        super().__init__(*args, **{**shared, "objective": R3FLoss(weight, eps, noise)})


@deprecated("WeightedCrossEntropy goes in 0.3: use CrossEntropy(model, weights=weights).")
class WeightedCrossEntropy(CrossEntropy):
    """:class:`attnreg.training.CrossEntropy` with weighted classes."""

    def __init__(self, weights: Sequence[float]) -> None:
        super().__init__(nn.Identity(), weights=weights)
