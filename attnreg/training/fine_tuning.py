"""Fine-tuning, plain or under a mask provider, on whole batches or in micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from attnreg.arguments import Count, a_function, whole_number
from attnreg.errors import InputError
from attnreg.injection import AttachHandle, attach, undisturbed
from attnreg.injection.running.rates import Sums, added
from attnreg.outputs import LossFunction, a_batch, check_one_mean, loss_of, rows_of, terms_of
from attnreg.regularizer.base import Regularizer, a_regularizer, described
from attnreg.sharding import load_whole_state, whole_state
from attnreg.training.method import (
    Batch,
    StepResult,
    TrainingMethod,
    Updater,
    check_learned,
    check_own_loss,
    held_by,
    look_at,
    with_penalty,
)
from attnreg.training.objective import ForwardPass, ObjectiveFunction, check_objective, title_of

Provided = Regularizer | AttachHandle | None


class Shared(TypedDict, total=False):
    """Keyword arguments that subclasses of :class:`FineTuning` share with it."""

    scheduler: LRScheduler | None
    max_grad_norm: float | None
    accelerator: Accelerator | None
    loss_function: LossFunction | None
    objective: ObjectiveFunction | None
    micro_batches: int


class FineTuning(TrainingMethod):
    """Fine-tune a model with one optimizer, plain or under a mask provider.

    Before every step, the provider may look at the batch (``attribute``, the first pass of AD-DROP). Its
    ``penalty`` is added to the loss.

    A subclass overrides a hook (:meth:`loss`, :meth:`before_update`, or ``step()``, which calls
    :meth:`accumulate` and :meth:`update`) and saves its state.

    Args:
        model: a model whose output has a ``loss`` if the batch has ``labels``.
        optimizer: holds the model's parameters, and those that the provider learns by the same loss.
        provider: mask provider for every self-attention of the model; or, to choose layers, a provider's handle.
        scheduler: learning-rate schedule, advanced after every optimizer step.
        max_grad_norm: clip the model's gradients to this norm, but not the provider's; ``None`` does not clip.
        accelerator: handles devices, precision and processes; it must not accumulate gradients itself.
        loss_function: computes the training loss, 0-d, from the model's output and the batch; by default the output's
            ``loss``. A first pass of the provider keeps its target.
        objective: an :class:`Objective`, or such a function; by default the loss of one pass.
        micro_batches: split a batch by rows into this many parts, one after the other, to save memory. Their
            gradients add up to the whole batch's, if the loss is a mean over rows or over labels that are not -100, and
            a provider's penalty no mean over tokens. Schedules and all counts still follow batches.

    Raises:
        InputError: if the optimizer lacks parameters that the provider learns, or the provider does not fit the
            ``loss_function``, the objective or ``micro_batches``. In a step: without a loss, or if it cannot be split.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from attnreg import AttentionDropout
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> method = FineTuning(model, torch.optim.SGD(model.parameters(), lr=0.1), AttentionDropout(0.1))
        >>> result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        >>> list(method.drop_rates())
        ['encoder.0']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: Provided = None,
        *,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = 1.0,
        accelerator: Accelerator | None = None,
        loss_function: LossFunction | None = None,
        objective: ObjectiveFunction | None = None,
        micro_batches: Count = 1,
    ) -> None:
        self.accelerator = accelerator
        self.loss_function = loss_function
        self.objective = objective
        self.micro_batches = whole_number("micro_batches", micro_batches)
        self.provider = provider.provider if isinstance(provider, AttachHandle) else provider
        if loss_function is not None:
            a_function("loss_function", loss_function, "the model's output and the batch")
        if self.provider is not None:
            self._check_parts(a_regularizer(self.provider, type(self).__name__))
        check_objective(objective, model, self.provider)
        self.handle = attach(model, provider) if isinstance(provider, Regularizer) else provider
        if self.handle is not None and not self.handle.holds(model):
            what = f"of another model than this {type(model).__name__}" if self.handle.attached else "detached"
            raise InputError(f"This handle is {what}, so nothing would be masked: pass the regularizer itself.")
        self.max_grad_norm = max_grad_norm
        if not hasattr(optimizer, "param_groups"):
            raise InputError(f"Expected an optimizer, such as `adamw(model, 1e-3)`, got {described(optimizer)}.")
        learned = [] if self.provider is None else self.provider.learned_parameters()
        trained = [parameter for parameter in (*model.parameters(), *learned) if parameter.requires_grad]
        if trained and not held_by(optimizer, trained):
            raise InputError(f"The optimizer holds no parameter that {type(model).__name__} trains: make a new one.")
        if learned and accelerator is not None and accelerator.is_fsdp2:
            raise InputError(
                f"{type(self.provider).__name__} learns parameters, which accelerate does not train under FSDP2: use "
                "data parallelism, or FSDP2 in your loop."
            )
        self.updater = Updater(max_grad_norm, accelerator)
        self._network, self.optimizer, self._model = model, optimizer, model
        if accelerator is not None:
            self._network, self.optimizer = accelerator.prepare(model, optimizer)
            self._model = accelerator.unwrap_model(self._network)  # once: a step reads it several times
        self.scheduler = scheduler
        self._learned: list[nn.Parameter] = []  # the provider's parameters in the optimizer
        self._rates: Sums = {}  # drop rates of micro-batches
        self._has_split = False
        if self.provider is not None:
            check_learned(self.optimizer, self.provider)
            if accelerator is not None:
                self.provider.to(accelerator.device)
            self._learned = held_by(self.optimizer, self.provider.parameters())
            if self._learned:
                self.updater.share(self.provider)

    def _check_parts(self, provider: Regularizer) -> None:
        """Check that all parts of a provider fit the loss, and mask rows independently if batches are split."""
        if self.loss_function is not None:
            check_own_loss(provider, "loss_function")
        for part in provider.parts():
            if part.decides_for_batch and self.micro_batches > 1:
                raise InputError(
                    f"{type(part).__name__} decides once for all rows of a batch, which micro-batches would not share: "
                    "train on whole batches, without gradient accumulation."
                )

    @property
    @override
    def model(self) -> nn.Module:
        return self._model

    @override
    def step(self, batch: Batch) -> StepResult:
        loss = self.accumulate(batch)
        self.update()
        return StepResult(self.updater.mean(loss))

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch or of a micro-batch, 0-d: what training minimizes.

        Override it to add a term that depends on the method's state; for a term of the model and the batch alone,
        write an :class:`Objective`.
        """
        if self.objective is None:
            return self._pass(batch)[0]
        forward = ForwardPass(self.model, self.provider, self._pass, title_of(self.objective))
        return self.objective(forward, batch)

    def before_update(self) -> None:
        """Change the gradients between clipping and the optimizer step; override it."""

    def accumulate(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of a batch in the parameters; return its loss, 0-d, detached."""
        self._network.train()
        self._rates = {}
        if self.micro_batches == 1:
            return self._backward(batch)
        if self.loss_function is None:
            check_one_mean(batch)
        if not self._has_split and self.updater.processes == 1:
            self._check_split(batch)
        self._has_split = True
        *parts, last = split_batch(batch, self.micro_batches, self.model)
        with self.updater.local(self._network):
            losses = [self._backward(*part) for part in parts]
        return sum(losses, self._backward(*last))

    @torch.no_grad()
    def _check_split(self, batch: Batch) -> None:
        """Check on the rows with the fewest and the most labels that the loss of both is the mean of their losses."""
        rows = split_batch(batch, rows_of(batch), self.model)
        (fewest, few_weight), *_, (most, most_weight) = sorted(2 * rows, key=itemgetter(1))
        joint = {**fewest}
        for name, value in fewest.items():
            if value is not most[name]:  # a value that is not split is in both
                joint[name] = torch.cat([value, most[name]]) if isinstance(value, Tensor) else [*value, *most[name]]
        weights = [*self.model.parameters()]
        is_half = torch.is_autocast_enabled(weights[0].device.type) or any(w.dtype.itemsize < 4 for w in weights)
        is_half |= self.accelerator is not None and self.accelerator.mixed_precision != "no"
        with undisturbed(self.model):
            losses = (loss_of(self.model(**part), part, self.loss_function) for part in (fewest, most, joint))
            few_loss, most_loss, joint_loss = map(float, losses)
        mean = (few_weight * few_loss + most_weight * most_loss) / (few_weight + most_weight)
        rounding = 0.02 * abs(joint_loss) + 0.01 if is_half else 1e-3 * abs(joint_loss) + 1e-4
        if fewest is not most and abs(mean - joint_loss) > rounding:
            raise InputError(
                f"The loss of {type(self.model).__name__} is no mean over rows or labels: of two rows, it is "
                f"{joint_loss:.4g}, and the mean of their losses is {mean:.4g}. Use `micro_batches=1`."
            )

    def update(self) -> None:
        """Update the parameters by the accumulated gradients, clear the gradients, and advance all schedules."""
        self.updater.average_gradients(self._learned)
        self.updater.step(self._network, self.optimizer, self.scheduler, before=self.before_update)
        if self.handle is not None:
            self.handle.step()

    def _backward(self, batch: Batch, weight: float | None = None) -> Tensor:
        """Accumulate the gradients of a batch, or of a part of it with its weight."""
        look_at(self.handle, self.model, batch)
        loss = self.loss(batch)
        if weight is not None:
            loss = weight * loss
        self.updater.backward(loss)
        if weight is not None and self.handle is not None:
            self._rates = added(self._rates, self.handle.drop_rate_tensors())
        return loss.detach()

    def _pass(self, batch: Batch) -> tuple[Tensor, Any]:
        """Make a forward pass; return its loss, with the provider's penalty, and the output of the model."""
        output = self._network(**a_batch(self.model, batch))
        return with_penalty(loss_of(output, batch, self.loss_function), self.handle), output

    @override
    def on_epoch(self, epoch: int) -> None:
        if self.provider is not None:
            self.provider.on_epoch(epoch)

    @override
    def drop_rates(self) -> dict[str, Tensor]:
        if self._rates:
            return {name: total / count for name, (total, count) in self._rates.items()}
        return {} if self.handle is None else self.handle.drop_rate_tensors()

    @property
    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "provider")}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: {} if part is None else whole_state(part, self.model) for name, part in self._parts.items()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            if part is not None:
                load_whole_state(part, self.model, state[name])


def split_batch(batch: Batch, count: int, model: nn.Module) -> list[tuple[Batch, float]]:
    """Split a batch by rows into parts with weights: the loss of the batch is the weighted sum of the parts' losses.

    A model's loss is a mean over rows or, if some labels are -100, over the other positions. A part's weight is its
    share of these terms. Parts without any are left out. The model tells whether labels are shifted. Lists with
    an entry per row, such as the masks of every image, are split, too.
    """
    named = batch if isinstance(batch, Mapping) else a_batch(model, batch)
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.dim()}
    rows = {name: len(value) for name, value in tensors.items()}
    if len(set(rows.values())) != 1:
        raise InputError(f"Cannot split the batch: its tensors have different numbers of rows: {rows}.")
    size = next(iter(rows.values()))
    split = tensors | {n: v for n, v in named.items() if isinstance(v, (list, tuple)) and len(v) == size}
    leaves_of = {name: tree_leaves(value) for name, value in named.items() if name not in split}
    if whole := [name for name, leaves in leaves_of.items() if any(isinstance(x, Tensor) and x.dim() for x in leaves)]:
        raise InputError(f"Cannot split the batch: {whole[0]!r} holds tensors, but not one entry per row, {size}.")
    bounds = [(int(rows[0]), int(rows[-1]) + 1) for rows in torch.arange(size).tensor_split(min(count, size))]
    parts = [{**batch, **{name: value[begin:end] for name, value in split.items()}} for begin, end in bounds]
    terms = [terms_of(model, part) for part in parts]
    total = sum(terms)
    if not total:  # the loss of the whole batch is NaN, too
        return [(batch, 1.0)]
    return [(part, term / total) for part, term in zip(parts, terms, strict=True) if term]
