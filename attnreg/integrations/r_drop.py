"""R-Drop in the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Trainer
from transformers.modeling_utils import unwrap_model

from attnreg.arguments import NotNegative, not_negative
from attnreg.attribution.outputs import labels_of, predictions_of
from attnreg.errors import InputError
from attnreg.integrations.accumulation import average_micro_batches, per_micro_batch
from attnreg.integrations.trainer import ADDropTrainer
from attnreg.regularizer.protocols import that_look_at_batches
from attnreg.training.micro_batches import aligned_labels
from attnreg.training.two_forward_passes import disagreement


class RDropTrainer(Trainer):
    r"""A :class:`transformers.Trainer` with two forward passes per batch and a loss on their difference.

    .. math:: \mathcal L = \tfrac12 \Big( \mathcal L_1 + \mathcal L_2 + \alpha \cdot
        \tfrac12 \big( \mathrm{KL}(P_1 \| P_2) + \mathrm{KL}(P_2 \| P_1) \big) \Big)

    It is the loss of :class:`attnreg.training.RDrop`. The two passes differ in the model's own dropout and in the masks
    of a provider, which :class:`AttnRegCallback` attaches. For a provider with a penalty or with learned parameters,
    write ``class Both(RDropTrainer, ADDropTrainer)``. Micro-batches are averaged as in :class:`ADDropTrainer`.

    Args:
        args: arguments of :class:`transformers.Trainer`.
        alpha: weight of the difference between the two predictions (alpha in the paper).
        kwargs: keyword arguments of :class:`transformers.Trainer`.

    Raises:
        ValueError: if ``alpha`` is negative or the provider needs a first pass over each batch. In a step: if the batch
            has no labels, if the outputs have no logits with gradients (as in TRL's SFTTrainer), or if the labels do
            not fit them.

    Reference:
        R-Drop (NeurIPS 2021, arXiv 2106.14448), Eq. 1 to 4.

    Example:
        >>> import attnreg
        >>> from attnreg.integrations import AttnRegCallback
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        >>> arguments = TrainingArguments("runs", report_to="none", use_cpu=True)
        >>> RDropTrainer(model, arguments, alpha=0.5, callbacks=[AttnRegCallback(attnreg.HiddenKey(0.1))]).alpha
        0.5
    """

    def __init__(self, *args: Any, alpha: NotNegative = 1.0, **kwargs: Any) -> None:
        self.alpha = not_negative("alpha", alpha)
        super().__init__(*args, **kwargs)
        average_micro_batches(self)
        if isinstance(self, ADDropTrainer) and (looking := that_look_at_batches(self.handle.provider)):
            raise InputError(
                f"R-Drop does not work with {type(looking[0]).__name__}, which needs a first pass over each batch."
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss; in training, from two forward passes."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # Copies, because a Trainer may take labels out of the inputs.
        first, output = super().compute_loss(model, {**inputs}, True, num_items_in_batch)
        second, other = super().compute_loss(model, {**inputs}, True, num_items_in_batch)
        logits, others = _logits(output), _logits(other)
        labels = inputs.get("labels") if logits is None else labels_of(inputs, logits)
        if labels is None or logits is None or others is None:
            raise InputError(
                f"R-Drop compares the predictions of two passes, but {type(self).__name__} has no "
                f"{'`labels` in its batches' if labels is None else '`logits` with gradients in its outputs'}. "
                "Use the Trainer of transformers with a model that returns logits."
            )
        difference = disagreement(logits, others, aligned_labels(unwrap_model(model), labels))
        loss = (first + second + self.alpha * per_micro_batch(self, difference, num_items_in_batch)) / 2
        return (loss, output) if return_outputs else loss


def _logits(output: Any) -> Tensor | None:
    logits = predictions_of(output) if isinstance(output, Mapping) else None
    # TRL's SFTTrainer returns logits of a plain pass without gradients, which would teach nothing.
    return logits if logits is not None and logits.requires_grad else None
