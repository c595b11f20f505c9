"""Evaluating a network on a task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
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
def predict(network: nn.Module, batches: Sequence[Batch], accelerator: Accelerator | None = None) -> Predictions:
    """The answers of a classifier, in eval mode; the network's mode is restored.

    Args:
        network: gives ``logits`` and ``loss``.
        batches: labelled batches.
        accelerator: if given, its processes, all of which must call this with the same batches, share the work.
    """
    rank, processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    training = network.training
    network.eval()
    mine = []
    for number in range(rank, len(batches), processes):
        output = network(**batches[number])
        labels = batches[number]["labels"]
        mine.append((number, float(output.loss) * len(labels), output.logits.float().cpu(), labels.cpu()))
    network.train(training)
    shared = mine if processes == 1 else sorted(gather_object(mine), key=itemgetter(0))
    _, losses, logits, answers = zip(*shared, strict=True)
    return Predictions(sum(losses) / sum(map(len, answers)), torch.cat(logits), torch.cat(answers))


def evaluate(
    network: nn.Module, batches: Sequence[Batch], metrics: Iterable[str], accelerator: Accelerator | None = None
) -> dict[str, float]:
    """Loss (mean over rows) and metrics of a classifier, in eval mode; the network's mode is restored.

    Args:
        network: gives ``logits`` and ``loss``.
        batches: labelled batches.
        metrics: names in :data:`attnreg.tasks.METRICS`.
        accelerator: if given, its processes, all of which must call this with the same batches, share the work.

    Returns:
        ``"loss"`` and the metrics, by name.
    """
    return predict(network, batches, accelerator).score(metrics)
