"""Evaluating a network on a task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from attnreg.tasks.metrics import METRICS
from attnreg.training.method import Batch


@torch.no_grad()
def evaluate(network: nn.Module, batches: Iterable[Batch], metrics: Iterable[str]) -> dict[str, float]:
    """Loss (mean over samples) and metrics of a classifier, in eval mode; the network's mode is restored.

    Args:
        network: gives ``logits`` and ``loss``.
        batches: labelled batches.
        metrics: names in :data:`attnreg.tasks.METRICS`.

    Returns:
        ``"loss"`` and the metrics, by name.
    """
    training = network.training
    network.eval()
    predictions: list[Any] = []
    references: list[Any] = []
    loss = 0.0
    for batch in batches:
        output = network(**batch)
        loss += float(output.loss) * len(batch["labels"])
        predictions += output.logits.argmax(-1).tolist()
        references += batch["labels"].tolist()
    network.train(training)
    results = {"loss": loss / len(references)}
    for name in metrics:
        results.update(METRICS[name](keep_in_memory=True).compute(predictions=predictions, references=references))
    return results
