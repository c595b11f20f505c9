"""Score a network while attention positions are dropped at evaluation."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from torch import nn

from attnreg.experiments.results.evaluation import evaluate
from attnreg.experiments.setup.setup import Setup
from attnreg.injection import AttachHandle, attach
from attnreg.regularizer.base import MaskProvider


class Probed(nn.Module):
    """A network in which a provider looks at each batch right before the forward pass on it.

    Args:
        network: the network.
        handle: handle of the attached provider.
    """

    def __init__(self, network: nn.Module, handle: AttachHandle) -> None:
        super().__init__()
        self.network = network
        self._handle = handle  # not the provider itself: `eval()` of this module must not reach it

    def forward(self, **batch: Any) -> Any:
        """Make the first pass, if the provider needs one, then the masked one."""
        self._handle.provider.attribute(self.network, batch)
        return self.network(**batch)


def probed_scores(run: Setup, network: nn.Module, provider: MaskProvider) -> dict[str, float]:
    """Score a network in eval mode on dev, under a provider's masks.

    The random state is the same afterwards, and the masks depend only on the run's seed.

    Returns:
        the metrics, and ``"dropped"``: the share of attention dropped in this process, mean over layers and batches.
    """
    cuda = [run.accelerator.device] if run.accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(cuda), attach(network, provider) as handle, handle.probing():
        torch.manual_seed(run.settings.seed)
        scores = evaluate(Probed(network, handle), run.dev, run.kind, run.accelerator)
        return {**scores, "dropped": fmean(handle.rates.mean().values())}
