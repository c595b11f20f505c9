from collections.abc import Mapping

import torch
from typing_extensions import override

import attnreg
from attnreg.errors import UsageError
from attnreg.experiments import recipe
from attnreg.outputs import loss_of
from attnreg.training import FineTuning, StepResult


class Frozen(FineTuning):
    """Trains nothing; a step returns the loss of its batch."""

    @override
    @torch.no_grad()
    def step(self, batch: Mapping[str, torch.Tensor]) -> StepResult:
        return StepResult(self.updater.mean(loss_of(self.model.eval()(**batch), batch, self.loss_function)))


@recipe("linear-probe", defaults={"epochs": 1})
def linear_probe(run: "attnreg.experiments.Run") -> None:
    """Linear probe: fit the last linear layer by regression, and leave the rest as pretrained.

    Example: attnreg recipe linear-probe --task sst2 --model MODEL --pooling mean
    """
    if run.loss_function is not None:
        raise UsageError(f"linear-probe fits the head by another loss, without {run.loss_flags}: remove the option.")
    strength = run.fit_head()
    run.report(run.train(Frozen), notes=[f"The L2 penalty chosen by cross-validation: {strength:g}."])
