"""Child-Tuning: update only a part of the weights, drawn anew in every step or chosen once by Fisher information."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from attnreg.arguments import InnerProbability, one_of, probability
from attnreg.errors import InputError
from attnreg.injection import undisturbed
from attnreg.masks import pack, unpack
from attnreg.outputs import loss_of
from attnreg.training.fine_tuning import FineTuning, Provided, Shared, split_batch
from attnreg.training.levels import base_of
from attnreg.training.method import LOSS_SCALE, Batch, StepResult, held_by

Mode = Literal["F", "D"]


class ChildTuning(FineTuning):
    r"""Fine-tune only a child network: mask the gradients of the other weights.

    .. math:: \text{F:} \quad \tilde g_i = g_i\, M_i / p, \quad M_i \sim \mathrm{Bernoulli}(p)

    .. math:: \text{D:} \quad \tilde g_i = g_i\, [F_i \text{ is among the top share } p], \quad
        F_i = \frac{1}{N} \sum_{n=1}^{N} \left( \frac{\partial \log P(y_n \mid x_n)}{\partial w_i} \right)^2

    F ("task-free") draws M for all weights in every step. D ("task-driven") computes the diagonal Fisher information of
    the pretrained weights on the training data before the first step, row by row in eval mode, and keeps the child
    fixed. D masks ``model.base_model`` only; all of a new head trains.

    The gradient is masked after clipping. As in the authors' code, weight decay and, in F, the moments of AdamW
    therefore still change masked weights.

    Args:
        model, optimizer: as in :class:`FineTuning`.
        provider: as in :class:`FineTuning`; it does not act in D's passes, and its parameters are not masked.
        mode: "F" (a random child in every step) or "D" (the child of the highest Fisher information).
        p: share of weights that are updated (p_F or p_D in the paper).
        data: for "D": batches of the training data, read once, before the first step. One of several processes
            may read its share or all of them.
        shared: further arguments of :class:`FineTuning`; the Fisher information uses its ``loss_function``, too.

    Raises:
        InputError: if an argument is out of range or ``data`` does not fit the mode. In the first step: if ``data`` is
            empty, or no gradient reaches the pretrained weights.

    Reference:
        Child-Tuning (Xu et al., EMNLP 2021, arXiv 2109.05687), Algorithm 1 and Section 2. The authors' code for D
        averages the squared gradients of batches, over the weights of the layers only.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "labels": torch.tensor([1, 0])}
        >>> method = ChildTuning(model, torch.optim.SGD(model.parameters(), lr=0.1), mode="D", p=0.3, data=[batch])
        >>> _ = method.step(batch)
        >>> sum(mask.sum() for mask in method.child.values()) / sum(mask.numel() for mask in method.child.values())
        tensor(0.3000)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: Provided = None,
        *,
        mode: Mode = "F",
        p: InnerProbability = 0.3,
        data: Iterable[Batch] | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        self.mode = one_of("mode", mode, get_args(Mode))
        self.p = probability("p", p, "(0, 1)")
        if (mode == "D") != (data is not None):
            raise InputError('ChildTuning needs `data`, batches of the training data, for mode "D", and only for it.')
        if mode == "D" and hasattr(model, "peft_config"):
            raise InputError(
                'ChildTuning cannot choose weights of adapters in mode "D": the first of their two matrices has no '
                'gradient at the start. Use mode "F", or train the whole model.'
            )
        super().__init__(model, optimizer, provider, **shared)
        self._data = data
        #: The masks of mode "D", by the name of the parameter, ``True`` = updated; empty before the first step.
        self.child: dict[str, Tensor] = {}
        held = set(held_by(self.optimizer, self.model.parameters()))
        self._weights = {name: p for name, p in self.model.named_parameters() if p in held and p.requires_grad}
        # The same generator in all processes: their global generators would choose different weights.
        seed = self.updater.gathered([int(torch.randint(2**62, ()))])[0]
        self._seeds = torch.Generator().manual_seed(seed)

    @override
    def step(self, batch: Batch) -> StepResult:
        if self._data is not None:
            self.child, self._data = self._choose(self._fisher(self._data)), None
        return super().step(batch)

    @override
    @torch.no_grad()
    def before_update(self) -> None:
        if self.mode == "D":
            for name, mask in self.child.items():
                gradient = self._weights[name].grad
                if gradient is not None:
                    gradient.mul_(mask)
            return
        seed = int(torch.randint(2**62, (), generator=self._seeds))
        generator_on = functools.cache(lambda device: torch.Generator(device).manual_seed(seed))
        for weight in self._weights.values():
            if weight.grad is not None:
                drawn = torch.rand(weight.shape, device=weight.device, generator=generator_on(weight.device))
                weight.grad.mul_((drawn < self.p).to(weight.grad) / self.p)

    def _fisher(self, data: Iterable[Batch]) -> dict[str, Tensor]:
        """Return the sums of squared gradients of single rows, by the name of the parameter."""
        pretrained = {id(parameter) for parameter in base_of(self.model).parameters()}
        weights = {name: weight for name, weight in self._weights.items() if id(weight) in pretrained}
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        is_scaled = self.accelerator is not None and self.accelerator.scaler is not None
        with undisturbed(self.model):
            for batch in data:
                rows = max(len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim())
                for row, _ in split_batch(batch, rows, self.model):
                    loss = loss_of(self.model(**row), row, self.loss_function) * (LOSS_SCALE if is_scaled else 1.0)
                    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
                    for total, gradient in zip(sums.values(), gradients, strict=True):
                        if gradient is not None:
                            total += gradient.square()
        return {name: self.updater.mean(total) for name, total in sums.items()}

    def _choose(self, fisher: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next((value.device for value in fisher.values()), None)  # of the first layer: there may be several
        values = torch.cat([value.flatten().to(device) for value in fisher.values()]) if fisher else torch.zeros(1)
        if not bool(values.isfinite().all()) or not bool(values.any()):
            raise InputError(
                "ChildTuning needs a finite Fisher information of the pretrained weights, which is not zero: check "
                "that `data` has labelled rows, and that the weights of `model.base_model` train."
            )
        chosen = torch.zeros_like(values, dtype=torch.uint8)
        chosen[values.topk(max(1, round(self.p * len(values))), sorted=False).indices] = 1
        if self.updater.processes > 1:
            chosen = broadcast(chosen)  # processes may break ties differently
        parts = chosen.bool().split([value.numel() for value in fisher.values()])
        pairs = zip(fisher.items(), parts, strict=True)
        return {name: part.view_as(value).to(value.device) for (name, value), part in pairs}

    @override
    def state_dict(self) -> dict[str, Any]:
        child = {name: pack(mask) for name, mask in self.child.items()}
        return {**super().state_dict(), "child": child, "seeds": self._seeds.get_state()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.child = {
            name: unpack([part.cpu() for part in packed]).to(self._weights[name].device)
            for name, packed in state["child"].items()
        }
        self._data = None if self.child else self._data  # the child is chosen once
        self._seeds.set_state(state["seeds"].cpu())
