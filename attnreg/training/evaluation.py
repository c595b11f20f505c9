"""Evaluating a network on a task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnreg.tasks.metrics import METRICS
from attnreg.training.method import Batch


class Predictions(NamedTuple):
    """A network's answers to labelled rows.

    Args:
        loss: mean over rows.
        logits: ``(n, classes)``, float32, on the CPU.
        labels: ``(n,)``.
    """

    loss: float
    logits: Tensor
    labels: Tensor

    def score(self, metrics: Iterable[str]) -> dict[str, float]:
        """Loss and metrics, by name; names in :data:`attnreg.tasks.METRICS`."""
        results = {"loss": self.loss}
        for name in metrics:
            metric = METRICS[name](keep_in_memory=True)
            results.update(metric.compute(predictions=self.logits.argmax(-1).tolist(), references=self.labels.tolist()))
        return results


@torch.no_grad()
def predict(network: nn.Module, batches: Iterable[Batch]) -> Predictions:
    """The answers of a classifier, in eval mode; the network's mode is restored.

    Args:
        network: gives ``logits`` and ``loss``.
        batches: labelled batches.
    """
    training = network.training
    network.eval()
    logits, labels, loss = [], [], 0.0
    for batch in batches:
        output = network(**batch)
        loss += float(output.loss) * len(batch["labels"])
        logits.append(output.logits.float().cpu())
        labels.append(batch["labels"].cpu())
    network.train(training)
    total = sum(map(len, labels))
    return Predictions(loss / total, torch.cat(logits), torch.cat(labels))


def evaluate(network: nn.Module, batches: Iterable[Batch], metrics: Iterable[str]) -> dict[str, float]:
    """Loss (mean over rows) and metrics of a classifier, in eval mode; the network's mode is restored.

    Args:
        network: gives ``logits`` and ``loss``.
        batches: labelled batches.
        metrics: names in :data:`attnreg.tasks.METRICS`.

    Returns:
        ``"loss"`` and the metrics, by name.
    """
    return predict(network, batches).score(metrics)
