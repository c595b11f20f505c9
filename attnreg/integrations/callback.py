"""A callback that connects a provider to the Hugging Face Trainer."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from attnreg.arguments import true_or_false
from attnreg.errors import AsleepWarning, InputError
from attnreg.injection import AttachHandle, attach
from attnreg.injection.running.rates import Sums, added
from attnreg.integrations.one_mask import OneMask
from attnreg.regularizer.abilities import asleep_for
from attnreg.regularizer.base import Regularizer, described
from attnreg.training.method import check_learned


class AttnRegCallback(TrainerCallback):
    """Steps a provider's schedules, logs its drop rates, saves it with every checkpoint and restores it on resuming.

    Args:
        provider: a provider, which is attached to the Trainer's model (all self-attention) when the Trainer has been
            created; or the handle that :func:`attnreg.attach` returned, to choose layers and stacks.
        one_mask: give every sample one mask in all passes whose log-probabilities a loss of TRL compares: with
            ``GRPOTrainer`` and ``RLOOTrainer`` the old policy and the policy, with ``DPOTrainer`` the chosen and the
            rejected answer. The same holds for the model's dropout; generation and reference passes are in eval mode.
            This needs :meth:`add_to`.

    Example:
        >>> import attnreg
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        >>> callback = AttnRegCallback(attnreg.HiddenKey(0.1))
        >>> trainer = Trainer(model, TrainingArguments("runs", report_to="none", use_cpu=True), callbacks=[callback])
        >>> [site.label for site in callback.handle.sites]
        ['encoder.0', 'encoder.0.output']
    """

    def __init__(self, provider: Regularizer | AttachHandle, *, one_mask: bool = False) -> None:
        self._provider = provider if isinstance(provider, Regularizer) else None  # to be attached
        self._handle = provider if isinstance(provider, AttachHandle) else None
        self._untrained: Regularizer | None = None  # a copy from before any training, for further models
        self._has_trained = False
        if self._provider is None and self._handle is None:
            raise InputError(f"Expected a provider or a handle of `attnreg.attach`, got {described(provider)}.")
        self.resumed_from: Path | None = None  #: the checkpoint that `train` is called with, if a RegularizedTrainer's
        self._sums: Sums = {}  # since the last log
        self._first_step, self._steps = 0, list[Tensor]()  # of training; of schedules after the latest step
        self._epoch = 0
        self._one_mask = true_or_false("one_mask", one_mask)
        self._mask_sharing: OneMask | None = None

    @property
    def handle(self) -> AttachHandle:
        """The handle of the provider; an error if it is not attached yet, because no Trainer has this callback."""
        if self._handle is None:
            raise InputError(
                f"{type(self._provider).__name__} is not attached yet. Pass the callback to a Trainer as "
                "`callbacks=[callback]`, or call `callback.add_to(trainer)`."
            )
        return self._handle

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the provider, if the callback has one that needs no :class:`RegularizedTrainer`."""
        model = kwargs.get("model")
        if self._provider is not None and isinstance(model, nn.Module):
            _check_supported(self._provider, "a callback", "`RegularizedTrainer(provider=...)`")
            self._attach(model)

    def _attach(self, model: nn.Module, *, to_new: bool = False) -> None:
        if self._provider is None or (self._handle is not None and self._handle.holds(model)):
            return
        if to_new and self._untrained is None and not self._has_trained:
            self._untrained = copy.deepcopy(self._provider)
        provider = self._provider if self._untrained is None else copy.deepcopy(self._untrained)
        self._handle = attach_in_trainer(model, provider, "seeded" if self._one_mask else "torch")

    def follow(self, model: nn.Module) -> None:
        """Attach a fresh copy of the provider to a new model, such as ``model_init`` makes, before it is trained.

        A callback that was created with a handle keeps it, and a provider that was detached stays so.

        Raises:
            InputError: if the provider cannot be attached, or ``one_mask`` belongs to another model.
        """
        if self._provider is None or not self.handle.attached or self.handle.holds(model):
            return
        if self._mask_sharing is not None:
            raise InputError("`one_mask=True` needs one model: create the trainer with `model`, not `model_init`.")
        self._attach(model, to_new=True)

    def add_to(self, trainer: Trainer) -> None:
        """Add this callback to a trainer, before the callbacks that report logs, so that they see the drop rates.

        ``Trainer(callbacks=[...])`` puts it after them instead, so that ``report_to`` does not get the drop rates. If
        the callback has a handle, nobody checks then that the Trainer supports the provider.

        Raises:
            InputError: if ``trainer`` is not a :class:`transformers.Trainer`, the provider needs the
                :class:`RegularizedTrainer` that was created with it, or ``one_mask`` is not possible.
        """
        name = type(trainer).__name__
        if not isinstance(trainer, Trainer):
            raise InputError(
                f"Expected a transformers Trainer, got a {name} from {type(trainer).__module__}. Pass the Trainer that "
                "it uses internally (SetFit: `trainer.st_trainer`)."
            )
        if not getattr(trainer, "adds_all", False):
            remedy = "RegularizedTrainer" if name == "Trainer" else f"`class Both(RegularizedTrainer, {name})`"
            _check_supported(self.handle.provider if self._provider is None else self._provider, name, remedy)
        assert trainer.model is not None
        self._attach(trainer.model)
        if self._one_mask and (self._mask_sharing is None or self._mask_sharing.trainer is not trainer):
            self._mask_sharing = OneMask(trainer, self.handle)
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(callback, AttnRegCallback) and callback is not self for callback in callbacks):
            raise InputError(f"This {name} has another AttnRegCallback: keep one, and compose regularizers as `a & b`.")
        if self in callbacks:  # by `callbacks=[...]`; it must not act twice
            callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restore the provider on resuming, on the model's device and in all processes; warn if it cannot act."""
        model = kwargs.get("model")
        if isinstance(model, nn.Module):  # SetFit's is none
            self.follow(model)
            if state.is_hyper_param_search and not self.handle.holds(model):
                raise InputError(
                    "`hyperparameter_search` makes a new model for every trial, but a handle belongs to one: pass the "
                    "provider to AttnRegCallback instead. To choose layers, pass `attnreg.OnLayers(provider, layers)`."
                )
        provider, self._has_trained = self.handle.provider, True
        if self._mask_sharing is None and (self._one_mask or hasattr(args, "steps_per_generation")):
            reason = "" if self._one_mask else ": this trainer compares two passes, which would have different masks"
            raise InputError(f"Call `AttnRegCallback(..., one_mask=True).add_to(trainer)` before training{reason}.")
        if asleep := self._why_asleep(args, state, **kwargs):
            warnings.warn(asleep, AsleepWarning, stacklevel=2)
        self._epoch = math.floor((state.epoch or 0.0) + 1e-6) if state.global_step else 0
        if state.global_step and provider.state_dict():
            self._restore(self._resumed_folder(args, state))
        provider.to(args.device)
        self._share(args)
        self._clear_gradients()
        self._first_step, self._steps, self._sums = state.global_step, self._schedule_steps(), {}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restore the provider of the best checkpoint, if the Trainer has loaded its model."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._restore(Path(state.best_model_checkpoint) / "attnreg")
            self._share(args)

    def _share(self, args: TrainingArguments) -> None:
        """Copy the provider's state from the first process to all processes."""
        for tensor in self.handle.provider.state_dict().values() if args.world_size > 1 else ():
            broadcast(tensor)

    def _resumed_folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        """Return the provider's folder in the checkpoint that the Trainer resumes; refuse that of another training."""
        if self.resumed_from is not None:
            return self.resumed_from / "attnreg"
        folder = _folder(args, state)
        file = folder.with_name("trainer_state.json")
        if file.is_file() and TrainerState.load_from_json(str(file)).log_history != state.log_history:
            raise InputError(
                f"The Trainer resumes another checkpoint than {folder.parent}, in which this callback would look for "
                f"its {type(self.handle.provider).__name__}: use RegularizedTrainer, or set `output_dir` to the folder "
                "of the checkpoint."
            )
        return folder

    def _restore(self, folder: Path) -> None:
        """Give the provider the state that :meth:`on_save` has saved; warn if there is none."""
        provider = self.handle.provider
        if not provider.state_dict():
            return
        if not folder.is_dir():
            text = f"There is no provider in {folder}. {type(provider).__name__} keeps its present state."
            warnings.warn(text, stacklevel=3)
            return
        saved = Regularizer.from_pretrained(folder, [*{type(part) for part in provider.parts()}])
        try:
            provider.load_state_dict(saved.state_dict())
        except RuntimeError as error:
            raise InputError(
                f"The state of the {type(saved).__name__} in {folder} does not fit the {type(provider).__name__} of "
                "this training: go on with the checkpoint's regularizer and its arguments."
            ) from error

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Tell the provider that an epoch begins."""
        # Counted here, because `state.epoch` is a share of all steps if the data has no length.
        self.handle.provider.on_epoch(self._epoch)
        self._epoch += 1

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Collect the drop rates, step the provider's schedules and clear its gradients."""
        self._sums = added(self._sums, self.handle.drop_rate_tensors())
        self._check_steps(state.global_step)
        self.handle.step()
        self._steps = self._schedule_steps() if state.global_step < self._first_step + 2 else []
        self._clear_gradients()

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add each site's drop rate to the logs of the training loss: the mean of the steps since the last log."""
        # SetFit renames the loss, but every Trainer logs the learning rate with it, and only with it.
        if logs is None or "learning_rate" not in logs or not self._sums:
            return
        added = {f"drop_rate/{label}": round(float(total) / of, 4) for label, (total, of) in self._sums.items()}
        self._sums = {}
        logs.update(added)
        state.log_history[-1].update(added)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the provider in the folder ``attnreg`` of the checkpoint."""
        if not state.is_world_process_zero:
            return
        try:
            self.handle.provider.save_pretrained(_folder(args, state))
        except InputError as error:
            warnings.warn(f"The checkpoint was saved without its provider. {error}", stacklevel=2)

    def _why_asleep(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = (),
        **_: Any,
    ) -> str | None:
        if not self.handle.attached:
            return "The handle of AttnRegCallback is detached. Attach the provider again and pass the new handle."
        if isinstance(model, nn.Module) and not self.handle.holds(model):
            name = type(self.handle.provider).__name__
            return (
                f"The trained {type(model).__name__} is not the model that {name} is attached to (`model_init` makes a "
                "new one). Create the model, attach the provider, then create the Trainer."
            )
        if optimizer is not None:
            try:
                check_learned(optimizer, self.handle.provider)
            except InputError as error:
                return str(error)
        by_epoch = any(type(part).on_epoch is not Regularizer.on_epoch for part in self.handle.provider.parts())
        if state.global_step and by_epoch and not has_length(train_dataloader):
            return "The Trainer resumes data without a length, whose epochs it does not know: masks may act in others."
        return asleep_for(self.handle.provider, math.ceil(state.num_train_epochs or args.num_train_epochs))

    def _schedule_steps(self) -> list[Tensor]:
        """Return copies of the steps that schedules have counted so far."""
        schedules = (part for part in self.handle.provider.parts() if type(part).step is not Regularizer.step)
        return [buffer.clone() for part in schedules for name, buffer in part.named_buffers() if name == "steps"]

    def _check_steps(self, step: int) -> None:
        """Refuse a schedule that other code steps, too; in the first two steps, since callbacks have an order."""
        if step <= self._first_step + 2 and any(map(torch.ne, self._steps, self._schedule_steps())):
            raise InputError(
                "A schedule advances twice in every optimizer step: remove your call of `handle.step()`, because "
                "AttnRegCallback makes it."
            )

    def _clear_gradients(self) -> None:
        # The Trainer calls model.zero_grad, not optimizer.zero_grad, and the provider is not part of the model.
        for parameter in self.handle.provider.learned_parameters():
            parameter.grad = None


def attach_in_trainer(
    model: nn.Module, provider: Regularizer, own_dropout: Literal["torch", "seeded"] = "torch"
) -> AttachHandle:
    """Attach a provider to a Trainer's model, or to the model of transformers in it (``SentenceTransformer``)."""
    if isinstance(model, PreTrainedModel) or callable(getattr(model, "get_base_model", None)):  # PEFT
        return attach(model, provider, own_dropout=own_dropout)
    inner: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(f"{outer}.") for outer in inner):
            inner[name] = module
    if len(inner) > 1:
        raise InputError(
            f"{type(model).__name__} contains {len(inner)} models: {', '.join(inner)}. Attach the provider to one of "
            "them with `attnreg.attach`, and pass the handle."
        )
    return attach(next(iter(inner.values()), model), provider, own_dropout=own_dropout)


def needs_of(part: Regularizer) -> list[str]:
    """Return why attaching a regularizer is not enough: reasons for a :class:`RegularizedTrainer`."""
    needs = {
        "looks at a batch before the training step on it (`attribute`)": part.looks_at_batches,
        "adds to the loss (`penalty`)": type(part).penalty is not Regularizer.penalty,
    }
    return [reason for reason, needed in needs.items() if needed]


def _check_supported(provider: Regularizer, user: str, remedy: str) -> None:
    for part in reversed(provider.parts()):  # inner regularizers first, to name them
        learns = ["is trained by the loss"] if part.learned_parameters() else []
        if reasons := [*needs_of(part), *learns]:
            raise InputError(f"{type(part).__name__} {reasons[0]}, which {user} does not support. Use {remedy}.")


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the provider's folder in the checkpoint of the present step."""
    assert args.output_dir is not None
    name = f"checkpoint-{state.global_step}"
    if state.is_hyper_param_search:  # the latest folder of a trial, whose name only the Trainer knows
        written = Path(args.output_dir).glob(f"*/{name}/trainer_state.json")
        return max(written, key=lambda file: file.stat().st_mtime_ns).parent / "attnreg"
    return Path(args.output_dir) / name / "attnreg"
