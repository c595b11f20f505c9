"""How a Trainer combines the losses of micro-batches under gradient accumulation."""

from __future__ import annotations

from torch import Tensor
from transformers import Trainer
from transformers.modeling_utils import unwrap_model


def average_micro_batches(trainer: Trainer) -> None:
    """Average the losses of micro-batches, unless the model says that it uses ``num_items_in_batch``."""
    assert trainer.model is not None
    if not hasattr(unwrap_model(trainer.model), "accepts_loss_kwargs"):
        trainer.model_accepts_loss_kwargs = False


def per_micro_batch(trainer: Trainer, term: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Scale a term of the loss so that the Trainer averages it over the micro-batches of an optimizer step."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # not in transformers 5.0
    if scaled is None:
        counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        scaled = counted or trainer.compute_loss_func is not None
    return term / trainer.current_gradient_accumulation_steps if scaled else term
