"""Contrastive fine-tuning: states of rows of one class are drawn together, states of different classes apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn

from attnreg.experiments.setup.batches import in_order
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.models.linear_head import of_rows
from attnreg.training import ForwardPass
from attnreg.training.method import Batch

_TEMPERATURE = 0.1


def contrastive_loss(states: Tensor, labels: Tensor) -> Tensor:
    r"""Return the supervised contrastive loss of states ``(n, d)``, 0-d; a row without another of its class has none.

    .. math:: \mathcal L_i = -\frac1{|P_i|} \sum_{p \in P_i} \log
        \frac{\exp(z_i \cdot z_p / \tau)}{\sum_{a \neq i} \exp(z_i \cdot z_a / \tau)}

    z are the states, normalized, P_i the other rows of the class of row i. The loss is the mean over rows.

    Reference:
        Khosla et al., Supervised Contrastive Learning (NeurIPS 2020, arXiv 2004.11362), Eq. 2.

    Example:
        >>> together = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> right, wrong = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
        >>> bool(contrastive_loss(together, right) < contrastive_loss(together, wrong))
        True
    """
    states = F.normalize(states.to(torch.promote_types(states.dtype, torch.float32)), dim=-1)
    diagonal = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    # Not infinity, which would make the gradients of a row without positives not finite.
    logs = (states @ states.T / _TEMPERATURE).masked_fill(diagonal, torch.finfo(states.dtype).min).log_softmax(1)
    positives = (labels[:, None] == labels) & ~diagonal
    has_any = positives.any(1)
    losses = -logs.masked_fill(~positives, 0.0).sum(1)[has_any] / positives.sum(1)[has_any]
    return losses.sum() / max(1, len(losses))


class Contrast:
    """The objective of contrastive fine-tuning: the :func:`contrastive_loss` of the states that the head reads."""

    def __init__(self, head: nn.Module) -> None:
        self._states = self._outputs = torch.empty(0)
        self.hook = head.register_forward_hook(self._keep_states)

    def _keep_states(self, head: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> None:
        self._states, self._outputs = args[0], outputs

    def __call__(self, forward: ForwardPass, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        _, logits = forward.predict(batch)
        states = of_rows(self._states, self._outputs, logits) if self._states.dim() == 3 else self._states
        return contrastive_loss(states, batch["labels"])


class PairedBatches:
    """Shuffled batches in which nearly all rows have another of their class. They depend on seed and epoch alone."""

    def __init__(
        self, rows: Dataset, labels: NDArray[np.int64], batch_size: int, kind: Kind, seed: int, device: torch.device
    ) -> None:
        self._rows, self._labels, self._seed = rows, labels, seed
        self._batch_size, self._kind, self._device = batch_size, kind, device
        self._lengths = np.array(kind.lengths(rows))

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        order = in_pairs(self._labels, self._lengths, self._batch_size, np.random.default_rng([self._seed, epoch]))
        yield from in_order(self._rows.select(order), self._batch_size, self._kind, self._device)


def in_pairs(
    labels: NDArray[np.int64], lengths: NDArray[np.int64], batch_size: int, draw: np.random.Generator
) -> NDArray[np.int64]:
    """Return a random order of rows, batch by batch, in which two rows of a class stand side by side.

    A batch has rows of all classes, by their share, as far as they have room. Its rows of one class are of similar
    length, which takes less padding.
    """
    noisy_lengths = lengths * draw.uniform(0.75, 1.25, len(lengths))
    pairs, positions = list[NDArray[np.int64]](), list[float]()
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        rows = rows[np.argsort(noisy_lengths[rows])]
        pairs_of_class = [rows[begin : begin + 2] for begin in range(0, len(rows), 2)]
        count = len(pairs_of_class)
        pairs += pairs_of_class
        positions += ((np.arange(count) + draw.random(count)) / count).tolist()
    order = np.concatenate([pairs[number] for number in np.argsort(positions)])
    batches = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    return np.concatenate([batches[number] for number in draw.permutation(len(batches))])
