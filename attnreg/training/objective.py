"""Objectives: what training minimizes, computed from one forward pass on a batch or from several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnreg.arguments import a_function
from attnreg.errors import InputError
from attnreg.outputs import IGNORED, aligned_labels, needed_labels_of, predictions_of
from attnreg.regularizer.abilities import that_look_at_batches
from attnreg.regularizer.base import Regularizer
from attnreg.training.method import Batch


@dataclass
class ForwardPass:
    """Makes the forward passes of an objective on one batch, in a training method or a Trainer.

    ``forward(batch)`` returns the training loss, 0-d, and the output of the model. It is the loss of one pass: it
    follows the ``loss_function`` of the method (or the Trainer's ``compute_loss``), with the provider's penalty.

    Raises:
        InputError: in the second pass on the batch, if the provider's masks hold for one pass: it looks at batches, or
            draws masks once per pass, and gradient checkpointing would recompute the first pass with the second's.
    """

    model: nn.Module
    provider: Regularizer | None
    run: Callable[[Batch], tuple[Tensor, Any]]
    title: str = "The objective"
    _passes: int = field(default=0, init=False)

    def __call__(self, batch: Batch) -> tuple[Tensor, Any]:
        """Make a forward pass; return its loss and the output of the model."""
        self._passes += 1
        if self._passes == 2 and self.provider is not None:
            check_looks_at_no_batch(self.provider, self.title)
            checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
            if parts := [part for part in self.provider.parts() if part.draws_in_prepare and checkpointing]:
                raise InputError(
                    f"{self.title} with {type(parts[0]).__name__} does not work under gradient checkpointing, which "
                    "would recompute the first pass with the masks of the second. Turn gradient checkpointing off."
                )
        return self.run(batch)

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Make a forward pass; return its loss and its logits, which must have gradients."""
        loss, output = self(batch)
        logits = predictions_of(output)
        if logits is None or not logits.requires_grad:  # TRL's SFTTrainer returns logits without gradients
            name = type(self.model).__name__
            raise InputError(f"{self.title} needs `logits` with gradients in the output of {name}, which has none.")
        return loss, logits

    def disagreement(self, batch: Batch, logits: Tensor, other: Tensor) -> Tensor:
        """Return the :func:`disagreement` of the logits of two passes on the batch."""
        return disagreement(logits, other, aligned_labels(self.model, needed_labels_of(batch, logits), logits))


class Objective(ABC):
    """The loss of a model on a batch, for ``objective`` of a training method or a :class:`RegularizedTrainer`.

    A function of the same two arguments is an objective, too.

    Example:
        >>> from attnreg.training import FineTuning, Objective
        >>> class Agreement(Objective):
        ...     title, passes = "Agreement", 2
        ...     def __call__(self, forward, batch):
        ...         (first, logits), (second, other) = forward.predict(batch), forward.predict(batch)
        ...         return (first + second) / 2 + (logits - other).square().mean()
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> method = FineTuning(model, torch.optim.SGD(model.parameters(), lr=0.1), objective=Agreement())
        >>> method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}).loss.shape
        torch.Size([])
    """

    #: name in messages
    title: ClassVar[str]
    #: number of forward passes on a batch
    passes: ClassVar[int] = 1

    @abstractmethod
    def __call__(self, forward: ForwardPass, batch: Batch) -> Tensor:
        """Return the loss of a batch, 0-d; ``forward`` makes the forward passes."""

    def check(self, model: nn.Module, provider: Regularizer | None) -> None:
        """Refuse a model or a provider that does not fit; called before the provider is attached.

        Raises:
            InputError: if there are several passes, and the provider needs a first pass over the batch.
        """
        if provider is not None and self.passes > 1:
            check_looks_at_no_batch(provider, self.title)


#: computes the training loss of a batch, 0-d
ObjectiveFunction = Callable[[ForwardPass, Batch], Tensor]


def check_objective(objective: Any, model: nn.Module, provider: Regularizer | None) -> None:
    """Raise if a value is no objective, or does not fit the model or the provider."""
    if objective is not None:
        a_function("objective", objective, "the forward pass and the batch, such as RDropLoss()")
    if isinstance(objective, Objective):
        objective.check(model, provider)


def title_of(objective: ObjectiveFunction) -> str:
    """Return the name of an objective, for messages."""
    return objective.title if isinstance(objective, Objective) else getattr(objective, "__name__", "The objective")


def check_looks_at_no_batch(provider: Regularizer, title: str) -> None:
    """Refuse providers that need a first pass over the batch: their masks hold for one forward pass, not two."""
    if looking := that_look_at_batches(provider):
        name = f"{type(looking[0]).__name__}, which needs a first pass over each batch"
        raise InputError(f"{title} does not work with {name}. Train without one of the two.")


def disagreement(logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    r"""Measure how far two predictions differ: symmetric KL for classes, mean squared error for scores.

    .. math:: \tfrac12 \big( \mathrm{KL}(P_1 \| P_2) + \mathrm{KL}(P_2 \| P_1) \big)
        = \tfrac12 \sum_c (P_{1c} - P_{2c}) (\log P_{1c} - \log P_{2c})

    Both logits are ``(..., C)``, where C = 1 is a score (regression), and labels ``(...)``. Returns the mean over rows,
    or over positions that are not labelled -100; 0-d.

    Raises:
        InputError: if C > 1 and the labels are not one class per row or position.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> disagreement(*logits, torch.tensor([1]))
        tensor(0.1155)
    """
    a, b = (logits, other) if logits.dtype == torch.float64 else (logits.float(), other.float())
    if logits.shape[-1] == 1:
        return (a - b).square().mean()
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise InputError(
            f"Expected labels to be classes of shape {tuple(logits.shape[:-1])}, to compare two predictions, got "
            f"{labels.dtype} of shape {tuple(labels.shape)}. Regression needs a model with one output."
        )
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    symmetric = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1) / 2
    counts = labels != IGNORED
    return symmetric.where(counts, 0.0).sum() / counts.sum()  # an index by a mask would wait for a GPU, twice
