"""Evaluate a network on a task."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from attnreg.experiments.setup.batches import Labelled
from attnreg.experiments.tasks.kinds.kind import Kind, Record
from attnreg.outputs import terms_of


class Predictions(NamedTuple):
    """A network's predictions on labelled rows."""

    loss: float | None  #: mean over labelled rows, words or tokens; ``None`` if the network returns no loss
    records: list[Record]  #: of every row: ``label``, ``prediction`` and further values of the kind of task


@torch.no_grad()
def predict(network: nn.Module, labelled: Labelled, kind: Kind, accelerator: Accelerator | None = None) -> Predictions:
    """Predict in eval mode, then restore the network's mode; arguments are as in :func:`evaluate`."""
    rank, processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    training = network.training
    network.eval()
    local = []
    # Every process makes as many passes, the last one perhaps in vain, because the passes of sharded models need all.
    for number in range(rank, -(-len(labelled.batches) // processes) * processes, processes):
        batch = labelled.batches[number % len(labelled.batches)]
        if kind.reading is None:
            output = network(**batch)
            weight = terms_of(network, batch)
        else:  # labels number the task's classes, which differ from the network's
            output, weight = network(**{name: tensor for name, tensor in batch.items() if name != "labels"}), 0
        loss = float(output.loss) * weight if weight else 0.0
        answers = kind.answers(network, batch, output)
        if number < len(labelled.batches):
            local.append((number, loss, weight, answers))
    network.train(training)
    gathered = local if processes == 1 else sorted(gather_object(local), key=itemgetter(0))
    _, losses, weights, parts = zip(*gathered, strict=True)
    by_row = dict(zip(labelled.order, (answer for part in parts for answer in part), strict=True))
    records = kind.records([by_row[row] for row in range(len(by_row))], labelled.references)
    return Predictions(sum(losses) / sum(weights) if sum(weights) else None, records)


def evaluate(
    network: nn.Module, labelled: Labelled, kind: Kind, accelerator: Accelerator | None = None
) -> dict[str, float]:
    """Compute the loss and the task's metrics in eval mode.

    Args:
        network: returns ``logits``, and ``loss`` if the batch has labels.
        labelled: the rows.
        kind: the kind of task.
        accelerator: splits the rows over its processes, which must all call this function with the same rows.

    Returns:
        The metrics by name, and ``"loss"`` (mean over labels) if the network returns one.
    """
    predictions = predict(network, labelled, kind, accelerator)
    loss = {} if predictions.loss is None else {"loss": predictions.loss}
    return {**loss, **kind.score(predictions.records)}


def evaluate_all(
    network: nn.Module, sets: Mapping[str, Labelled], kind: Kind, accelerator: Accelerator | None = None
) -> dict[str, float]:
    """Evaluate several sets with :func:`evaluate`; keys are ``<set>_<metric>``, or ``<metric>`` for the set ``""``."""
    return {
        f"{name}_{key}" if name else key: value
        for name, labelled in sets.items()
        for key, value in evaluate(network, labelled, kind, accelerator).items()
    }
