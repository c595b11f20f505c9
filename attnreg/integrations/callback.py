"""What a provider needs of a Trainer's loop."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from attnreg.errors import AsleepWarning, InputError
from attnreg.injection import AttachHandle
from attnreg.provider.asleep import asleep_for
from attnreg.provider.base import MaskProvider
from attnreg.provider.protocols import looks_at_batches

FOLDER = "attnreg"


class TrainsProviders:
    """A Trainer that also calls ``attribute``, adds ``penalty`` to the loss and trains what a provider learns."""


class AttnRegCallback(TrainerCallback):
    """Advances a provider's schedules, logs its drop rates, saves it with each checkpoint and restores it on resuming.

    Args:
        handle: of :func:`attnreg.attach`.

    Example:
        >>> import attnreg
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        >>> handle = attnreg.attach(model, attnreg.AttentionLayerDrop(0.2))
        >>> trainer = Trainer(model, TrainingArguments("runs", report_to="none", use_cpu=True))
        >>> AttnRegCallback(handle).add_to(trainer)
    """

    def __init__(self, handle: AttachHandle) -> None:
        self.handle = handle
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def add_to(self, trainer: Trainer) -> None:
        """Join a trainer's callbacks in front of those that report, so that they see the drop rates.

        ``Trainer(callbacks=[...])`` would put it behind them: all would work but for the drop rates in ``report_to``,
        and it would not be checked that the Trainer does what the provider needs.

        Raises:
            InputError: if the provider needs an :class:`ADDropTrainer` and the trainer is none, or it is no
                :class:`transformers.Trainer` at all.
        """
        name = type(trainer).__name__
        if not isinstance(trainer, Trainer):
            raise InputError(
                f"Expected a Trainer of transformers, got a {name} of {type(trainer).__module__}: pass the one that it "
                "trains with (SetFit: `trainer.st_trainer`)."
            )
        if not isinstance(trainer, TrainsProviders):
            for module in reversed(list(self.handle.provider.modules())):  # those within come first, to be named
                if isinstance(module, MaskProvider) and (why := _needs_more_than_masks(module)):
                    raise InputError(
                        f"Expected an ADDropTrainer for {type(module).__name__}, which {why}, got a {name}, which does "
                        "not see to that"
                        + ("." if name == "Trainer" else f": `class Both(ADDropTrainer, {name})` does.")
                    )
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the provider to the model's device; on resuming, restore it; give all processes the first one's.

        Warns:
            AsleepWarning: if the provider is not attached to the model that is trained, or does not act in its epochs.
        """
        provider = self.handle.provider
        if why := self._why_asleep(kwargs.get("model"), args, state):
            warnings.warn(why, AsleepWarning, stacklevel=2)
        if state.global_step and provider.state_dict():
            folder = _folder(args, state)
            if folder.is_dir():
                classes = {type(each) for each in provider.modules() if isinstance(each, MaskProvider)}
                saved = MaskProvider.from_pretrained(folder, list(classes))
                provider.load_state_dict(saved.state_dict())
            else:
                warnings.warn(
                    f"Expected the provider of step {state.global_step} in {folder}, found none: it goes on as it is "
                    "now. Load it with `from_pretrained` before you resume.",
                    stacklevel=2,
                )
        provider.to(args.device)
        if args.world_size > 1:
            for tensor in provider.state_dict().values():
                broadcast(tensor)
        self._clear_gradients()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the provider."""
        self.handle.provider.on_epoch(math.floor((state.epoch or 0.0) + 1e-6))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the provider; take its drop rates; clear its gradients."""
        rates = self.handle.drop_rate_tensors()
        if rates:
            self._sums = {label: rate + self._sums.get(label, 0.0) for label, rate in rates.items()}
            self._steps += 1
        self.handle.step()
        self._clear_gradients()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the drop rates, mean over the steps since the last time, to what is logged with the training loss."""
        # SetFit renames the loss; no Trainer logs the learning rate but with it.
        if logs is None or "learning_rate" not in logs or not self._steps:
            return
        rates = {label: float(total) / self._steps for label, total in self._sums.items()}
        self._sums, self._steps = {}, 0
        added = {f"drop_rate/{label}": round(rate, 4) for label, rate in rates.items()}
        logs.update(added)
        state.log_history[-1].update(added)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the provider into the checkpoint's folder ``attnreg``."""
        if not state.is_world_process_zero:
            return
        try:
            self.handle.provider.save_pretrained(_folder(args, state))
        except InputError as error:
            warnings.warn(f"The checkpoint is without its provider. {error}", stacklevel=2)

    def _why_asleep(self, model: Any, args: TrainingArguments, state: TrainerState) -> str | None:
        if not self.handle.attached:
            return "The handle of AttnRegCallback is detached: attach the provider again, and pass the new handle."
        if isinstance(model, nn.Module) and not self.handle.holds(model):  # SetFit's is none
            name = type(self.handle.provider).__name__
            return (
                f"The {type(model).__name__} that is trained is not the model that {name} is attached to (`model_init` "
                "makes another): make the model first, attach, then make the Trainer."
            )
        return asleep_for(self.handle.provider, math.ceil(state.num_train_epochs or args.num_train_epochs))

    def _clear_gradients(self) -> None:
        # The Trainer clears those of the model, of which the provider is no part, and never calls optimizer.zero_grad.
        for parameter in self.handle.provider.learned_parameters():
            parameter.grad = None


def _needs_more_than_masks(provider: MaskProvider) -> str | None:
    """Why a training loop that only runs the attached model does not do for a provider; ``None`` if it does."""
    if looks_at_batches(provider):
        return "looks at each batch before it is trained on (`attribute`)"
    if type(provider).penalty is not MaskProvider.penalty:
        return "adds to the loss (`penalty`)"
    return "learns by the loss" if provider.learned_parameters() else None


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER
