"""What a fit tries: a linear probe, and ways of fine-tuning, each trained on some rows and asked about others."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from datasets import Dataset
from numpy.typing import NDArray
from torch import nn
from torch.utils.benchmark import Timer

from attnreg import ADDrop
from attnreg.errors import InputError
from attnreg.experiments.fit.answers import Answers
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.contrast import Contrast, PairedBatches
from attnreg.experiments.results.evaluation import predict
from attnreg.experiments.setup.batches import Labelled, TrainBatches, to_score
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.models.linear_head import head_and_features, put_into_head
from attnreg.training import FineTuning, RDropLoss
from attnreg.training.method import Batch
from attnreg.training.start import adamw

_WARMUP = 0.1  # of the steps
_AHEAD = 64  # rows of a batch that is only read
_MEASURED = 5  # steps, or products
_SIDE = 384  # of matrices
_FASTER = 1.15  # times, by which bfloat16 must be faster
_RIDGE = 10.0  # penalty of ridge regression where C is 1
Logits = NDArray[np.float64]


@dataclass(frozen=True)
class Try:
    """A way to make a classifier of the pretrained model. Without epochs, only its head is fitted (a linear probe)."""

    epochs: int = 0
    learning_rate: float = 0.0
    penalty: float = 1.0  #: of the regression that fits the head, logistic or ridge, as its inverse, C
    fits_head: bool = False  #: whether the head is fitted before fine-tuning, too (LP-FT)
    contrasts: bool = False  #: whether states are trained by pairs of rows, and the head is fitted to them at the end
    ad_drop: bool = False
    r_drop: bool = False

    @property
    def is_probe(self) -> bool:
        """Whether only the head is fitted."""
        return not self.epochs

    @property
    def is_plain(self) -> bool:
        """Whether it is fine-tuning and nothing else."""
        return not (self.is_probe or self.fits_head or self.contrasts or self.ad_drop or self.r_drop)

    @property
    def passes(self) -> float:
        """Passes over the rows, as multiples of a plain epoch."""
        with_ad_drop = self.epochs // 2 if self.ad_drop else 0  # a pass more in every other epoch
        return (self.epochs + 0.75 * with_ad_drop) * (2.0 if self.r_drop else 1.0) + self.contrasts / 3

    def __str__(self) -> str:
        if self.is_probe:
            return f"linear probe (C {self.penalty:g})"
        name = "LP-FT" if self.fits_head else "contrastive fine-tuning" if self.contrasts else "fine-tuning"
        more = " with AD-DROP" * self.ad_drop + " with R-Drop" * self.r_drop
        rate = f"{self.learning_rate:.3g}".replace("e-0", "e-")
        return f"{name}{more} ({self.epochs} epoch{'s' * (self.epochs > 1)} at {rate})"


class Bench:
    """A pretrained model and rows, encoded once, on which tries are trained. The model itself stays as it is."""

    seconds = math.nan  #: of a row in an epoch of plain fine-tuning, measured
    in_bfloat16 = False  #: whether networks compute in it while they train; their weights stay in float32

    def __init__(
        self, model: Any, kind: Kind, rows: Dataset, batch_size: int, accelerator: Accelerator, seed: int
    ) -> None:
        self.model, self.kind, self.rows, self.accelerator = model.to(accelerator.device), kind, rows, accelerator
        self.batch_size, self.seed = batch_size, seed
        #: that a training may use; small batches gain little from many, and on a busy machine they wait for each other
        self.threads = torch.get_num_threads() if accelerator.device.type == "cpu" else 1
        self.head, self.states, self.labels = self._read(self.model, rows)
        self.width = self.head.in_features
        if not kind.has_classes and self.head.bias is None:
            raise InputError(f"The head of {type(model).__name__} has no bias, which predicting numbers needs.")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "accelerator": None}  # whose state cannot always be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, accelerator=Accelerator(cpu=True))  # on another device there is one process

    def out_of_fold(
        self, which: Try, train: NDArray[np.int64], held: NDArray[np.int64], seed: int, tick: Callable[[], None]
    ) -> Logits:
        """Train on some rows; return the logits of others, ``(n, outputs)``."""
        if which.is_probe:
            head = copy.deepcopy(self.head)
            self._fit_head(head, self.states[train], self.labels[train], which.penalty)
            return head(self.states[held]).detach().cpu().double().numpy()
        network = self.trained(which, train, seed, tick)
        return self.logits(network, self.rows.select(held))

    def trained(self, which: Try, train: NDArray[np.int64], seed: int, tick: Callable[[], None]) -> nn.Module:
        """Return a copy of the model that was trained on some rows; ``tick`` is called after each step."""
        torch.manual_seed(seed)
        (network, head), labels = copy.deepcopy((self.model, self.head)), self.labels[train]
        if which.is_probe or which.fits_head:
            self._fit_head(head, self.states[train], labels, which.penalty)
        if which.is_probe:
            return network.eval()
        self._set_precision(network)
        rows, began, device = self.rows.select(train), Clock.now(), self.accelerator.device
        batches: TrainBatches | PairedBatches
        if which.contrasts:
            batches = PairedBatches(rows, labels, self.batch_size, self.kind, seed, device)
        else:
            batches = TrainBatches(rows, self.batch_size, self.kind, seed, self.accelerator)
        optimizer, steps = adamw(network, which.learning_rate), which.epochs * len(batches)
        warmup = max(1, int(_WARMUP * steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
        )
        provider = ADDrop(p=0.3, q=0.5, layers=[0]) if which.ad_drop else None
        contrast = Contrast(head) if which.contrasts else None
        objective = RDropLoss(alpha=1.0) if which.r_drop else contrast
        method = FineTuning(network, optimizer, provider, scheduler=schedule, objective=objective)
        for epoch in range(which.epochs):
            method.on_epoch(epoch)
            for batch in batches.epoch(epoch):
                method.step(batch)
                tick()
        if method.handle is not None:
            method.handle.detach()
        vars(network).pop("forward", None)  # others compute in float32
        if contrast is not None:
            contrast.hook.remove()
        if contrast is not None and all(bool(each.isfinite().all()) for each in network.parameters()):
            self._fit_head(*self._read(network, rows)[:2], labels, which.penalty)
        self.observe((Clock.now() - began) / (which.passes * len(train)))
        return network.eval()

    def observe(self, seconds: float) -> None:
        """Take the seconds of a row in a training into account: machines are busy at times."""
        self.seconds = seconds if math.isnan(self.seconds) else (self.seconds + seconds) / 2

    def logits(self, network: nn.Module, rows: Dataset) -> Logits:
        """Return the logits of encoded rows, ``(n, outputs)``."""
        return logits_of(network, to_score(rows, _AHEAD, self.kind, self.accelerator.device), self.kind)

    def measure(self) -> None:
        """Measure the seconds of a row in training, and choose the number of threads, and precision, of the fewest.

        Some processors multiply bfloat16 twice as fast, others much slower.
        """
        seconds = {1: self.seconds_with(1)}
        for threads in {(self.threads + 1) // 2, self.threads} - {1}:
            seconds[threads] = self.seconds_with(threads, slowest=min(seconds.values()))
        self.seconds, fewest = min((each, threads) for threads, each in seconds.items())
        torch.set_num_threads(fewest)
        if self._of_product(torch.bfloat16) > 2 * self._of_product(torch.float32):
            return  # without instructions for it, a step would take minutes
        self.in_bfloat16 = True
        in_bfloat16 = self.seconds_with(fewest, slowest=self.seconds)
        self.in_bfloat16 = in_bfloat16 < self.seconds / _FASTER
        self.seconds = in_bfloat16 if self.in_bfloat16 else self.seconds

    def _of_product(self, dtype: torch.dtype) -> float:
        """Measure the seconds of a product of matrices."""
        matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device=self.accelerator.device)
        timer = Timer("(matrix @ matrix).sum().item()", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
        return float(timer.timeit(_MEASURED).mean)

    @functools.cached_property
    def _some(self) -> list[Batch]:
        """A few batches, without the first of an epoch, which has the longest texts."""
        batches = list(TrainBatches(self.rows, self.batch_size, self.kind, self.seed, self.accelerator).epoch(0))
        every = max(1, len(batches) // _MEASURED)
        return batches[(every + 1) // 2 :: every] or batches

    @property
    def measured_rows(self) -> int:
        """How many rows are trained on when their seconds are measured."""
        return sum(len(batch["labels"]) for batch in self._some)

    def seconds_with(self, threads: int, slowest: float = math.inf) -> float:
        """Measure the seconds of a row with some threads, by a step on a few batches; infinite if it is the slowest.

        A first step is left out.
        """
        torch.set_num_threads(threads)
        network = copy.deepcopy(self.model)
        self._set_precision(network)
        method = FineTuning(network, adamw(network, 1e-5))
        float(method.step(self._some[-1]).loss)
        began = Clock.now()
        for batch in self._some:
            float(method.step(batch).loss)
            if Clock.now() - began > slowest * self.measured_rows:
                return math.inf
        return (Clock.now() - began) / self.measured_rows

    def _set_precision(self, network: nn.Module) -> None:
        """Let a network compute in bfloat16, and return numbers in float32, if that is faster."""
        if self.in_bfloat16:
            autocast = torch.autocast(self.accelerator.device.type, torch.bfloat16)
            network.forward = convert_outputs_to_fp32(autocast(network.forward))

    def _read(self, network: nn.Module, rows: Dataset) -> tuple[nn.Linear, torch.Tensor, NDArray[Any]]:
        """Return the head of a network, the states that it reads of each row, and the labels."""
        given = to_score(rows, _AHEAD, self.kind, self.accelerator.device)
        head, states, labels = head_and_features(network, given.batches)
        places = np.argsort(given.order)
        return head, states[places], labels.cpu().numpy()[places]

    def _fit_head(self, head: nn.Linear, states: torch.Tensor, labels: NDArray[Any], penalty: float) -> None:
        """Set a head to logistic regression, or ridge regression to numbers, on states that it reads."""
        from sklearn.linear_model import LogisticRegression, Ridge

        biased, given = head.bias is not None, states.cpu().double().numpy()
        probe = Ridge(_RIDGE / penalty)
        if self.kind.has_classes:
            probe = LogisticRegression(C=penalty, max_iter=1000, fit_intercept=biased)
        # Of one scale, so that one penalty fits all models.
        center, scale = given.mean(0) * biased, max(given.std(), 1e-6)
        fitted = probe.fit(((given - center) / scale).astype(np.float32), labels)
        weight = fitted.coef_ / scale
        put_into_head(head, weight, fitted.intercept_ - weight @ center, getattr(fitted, "classes_", None))

    def rescale(self, network: nn.Module, answers: Answers) -> None:
        """Let a network that was trained on standardized numbers predict those of the data."""
        head = self._read(network, self.rows.select(range(2)))[0]
        put_into_head(head, head.weight * answers.scale, head.bias * answers.scale + answers.center)


def logits_of(network: nn.Module, rows: Labelled, kind: Kind) -> Logits:
    """Return the logits of rows, ``(n, outputs)``."""
    records = predict(network, rows, kind).records
    return np.array([each["logits"] if kind.has_classes else [each["prediction"]] for each in records])
