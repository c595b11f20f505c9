"""The tries of a fit, linear probes and ways of fine-tuning: trained on some rows, scored on others."""

from __future__ import annotations

import copy
import functools
import math
import timeit
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from datasets import Dataset
from numpy.typing import NDArray
from torch import nn

from attnreg import ADDrop, AttentionDropout, attach
from attnreg.errors import AttnRegWarning, InputError
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.contrast import Contrast, PairedBatches
from attnreg.experiments.fit.used_tokens import UsedTokens
from attnreg.experiments.results.evaluation import predict
from attnreg.experiments.setup.batches import Labelled, TrainBatches, in_order, to_score
from attnreg.experiments.setup.rows import MUCH
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.models.linear_head import head_and_features, put_into_head
from attnreg.injection import CoverageWarning, draws_repeated
from attnreg.training import FineTuning, RDropLoss
from attnreg.training.cross_entropy import CrossEntropy, balanced_weights
from attnreg.training.method import Batch
from attnreg.training.start import adamw

_WARMUP = 0.1  # of the steps
_AHEAD = 64  # rows of a batch without gradients
_MEASURED = 5  # steps
_FASTER = 1.15  # times, by which bfloat16 must be faster than float32
_AT_END = 0.1  # penalty C of the last fit of a head that was trained
_RIDGE = 10.0  # penalty of ridge regression where C is 1
Logits = NDArray[np.float64]
Paced = Callable[[Sequence[Batch]], Iterable[Batch]]  # yields batches, and watches the time


@dataclass(frozen=True)
class Try:
    """A way to train the pretrained model. Without epochs, only its head is fitted (a linear probe)."""

    epochs: int = 0
    learning_rate: float = 0.0
    penalty: float = 1.0  #: of the logistic or ridge regression that fits the head, as its inverse, C
    fits_head: bool = False  #: whether the head is fitted before fine-tuning, too (LP-FT)
    contrasts: bool = False  #: whether pairs of rows train the states
    ad_drop: bool = False
    r_drop: bool = False
    max_length: int = 0  #: tokens at which texts are cut; 0 as usual

    @property
    def is_probe(self) -> bool:
        """Whether only the head is fitted."""
        return not self.epochs

    @property
    def is_plain(self) -> bool:
        """Whether the try is fine-tuning and nothing else."""
        return not (self.is_probe or self.fits_head or self.contrasts or self.ad_drop or self.r_drop)

    @property
    def ends_with_fit(self) -> bool:
        """Whether the head is fitted at the end, to the states that training has made."""
        return self.fits_head or self.contrasts

    @property
    def passes(self) -> float:
        """Passes over the rows, as multiples of a plain epoch at this length."""
        with_ad_drop = self.epochs // 2 if self.ad_drop else 0  # a pass more in every other epoch
        return (self.epochs + 0.75 * with_ad_drop) * (2.0 if self.r_drop else 1.0) + self.ends_with_fit / 3

    def __str__(self) -> str:
        tokens = f", {self.max_length} tokens" * (self.max_length > 0)
        if self.is_probe:
            return f"linear probe (C {self.penalty:g}{tokens})"
        name = "LP-FT" if self.fits_head else "contrastive fine-tuning" if self.contrasts else "fine-tuning"
        methods = " with AD-DROP" * self.ad_drop + " with R-Drop" * self.r_drop
        rate = f"{self.learning_rate:.3g}".replace("e-0", "e-")
        return f"{name}{methods} ({self.epochs} epoch{'s' * (self.epochs > 1)} at {rate}{tokens})"


class Encoded(NamedTuple):
    """The rows of a fit, cut at the length of a kind."""

    kind: Kind
    rows: Dataset
    states: torch.Tensor  #: that the head of the pretrained model reads
    seconds: float  #: that the model took to read the rows


class Bench:
    """A pretrained model, which stays unchanged, and encoded rows, on which tries are trained."""

    seconds = math.nan  #: per row and epoch of plain fine-tuning, measured
    in_bfloat16 = False  #: whether networks compute in bfloat16 in training; weights stay in float32
    balanced = False  #: whether all classes weigh the same in training, however many rows they have
    longest = 0  #: tokens at which texts may be cut, if a race finds that this helps

    def __init__(
        self,
        model: Any,
        kind: Kind,
        rows: Dataset,
        batch_size: int,
        device: torch.device,
        seed: int,
        paced: Paced = iter,
    ) -> None:
        self.kind, self.device, self.texts, self.batch_size, self.seed = kind, device, rows, batch_size, seed
        self.tokens = UsedTokens(model.to(device), kind.tokenizer.pad_token_id)
        #: at most, per training; small batches gain little from many threads, which wait for each other
        self.threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._head_inputs(model, kind.encode(rows.select(range(2))))  # a first pass takes longer than others
        self.encoded = {0: self._read(kind, paced)}  #: by :attr:`Try.max_length`
        self.width = self.head.in_features
        if not kind.has_classes and self.head.bias is None:
            raise InputError(f"The head of {type(model).__name__} has no bias, which predicting numbers needs.")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "texts": None, "tokens": None}  # all rows are read already

    @property
    def latest(self) -> Encoded:
        """The rows, cut at the greatest length so far."""
        return [*self.encoded.values()][-1]

    @property
    def next_length(self) -> int:
        """A length, twice that of now, at which texts may be cut; 0 if few texts are, or no more tokens may be read."""
        length = self.latest.kind.max_length
        longer = min(self.longest, 2 * length)
        if longer <= length or np.mean(np.array(self.kind.lengths(self.latest.rows)) >= length) <= MUCH:
            return 0
        return longer

    def read_longer(self, max_length: int) -> bool:
        """Read all rows, cut at another length; return whether memory and positions sufficed."""
        try:
            self.encoded[max_length] = self._read(replace(copy.deepcopy(self.kind), max_length=max_length))
        except (MemoryError, RuntimeError, IndexError):  # torch's memory errors are RuntimeErrors
            return False
        return True

    def slowness(self, candidate: Try) -> float:
        """Return how many times as long a pass takes as at the usual length."""
        return max(1.0, self.encoded[candidate.max_length].seconds / self.encoded[0].seconds)

    def has_memory_for(self, candidate: Try) -> bool:
        """Whether a device has the memory for a step on the longest rows, cut at more tokens than usual."""
        if not candidate.max_length or self.device.type == "cpu":
            return True  # a system whose memory is full does not tell
        rows = self.encoded[candidate.max_length].rows
        longest = np.argsort(self.kind.lengths(rows))[-self.batch_size :]
        network = copy.deepcopy(self.model)
        self._set_precision(network)
        try:
            batch = in_order(rows.select(longest), self.batch_size, self.kind, self.device)[0]
            FineTuning(network, adamw(network, 1e-5)).step(batch)
        except (RuntimeError, MemoryError):
            return False
        return True

    def _read(self, kind: Kind, paced: Paced = iter) -> Encoded:
        rows, began = kind.encode(self.texts), Clock.now()
        with self.tokens.watched():
            head, states, self.labels = self._head_inputs(self.tokens.model, rows, paced)
        encoded = Encoded(kind, rows, states, max(1e-3, Clock.now() - began))
        names = {module: name for name, module in self.tokens.model.named_modules()}
        self.model = self.tokens.small()
        self.head = self.model.get_submodule(names[head])
        return encoded

    def out_of_fold(
        self, candidate: Try, train: NDArray[np.int64], held: NDArray[np.int64], seed: int, tick: Callable[[], None]
    ) -> Logits:
        """Train on some rows; return the logits of held-out rows, ``(n, outputs)``."""
        if candidate.is_probe:
            head = copy.deepcopy(self.head)
            states = self.encoded[candidate.max_length].states
            self._fit_head(head, states[train], self.labels[train], candidate.penalty)
            return head(states[held]).detach().cpu().double().numpy()
        network = self.trained(candidate, train, seed, tick)
        return self.logits(network, self.encoded[candidate.max_length].rows.select(held))

    def trained(self, candidate: Try, train: NDArray[np.int64], seed: int, tick: Callable[[], None]) -> nn.Module:
        """Return a copy of the model, trained on some rows; ``tick`` is called after every step."""
        torch.manual_seed(seed)
        (network, head), labels = copy.deepcopy((self.model, self.head)), self.labels[train]
        encoded = self.encoded[candidate.max_length]
        if candidate.is_probe or candidate.fits_head:
            self._fit_head(head, encoded.states[train], labels, candidate.penalty)
        if candidate.is_probe:
            return network.eval()
        self._set_precision(network)
        rows, began, device = encoded.rows.select(train), Clock.now(), self.device
        batches: TrainBatches | PairedBatches
        if candidate.contrasts:
            batches = PairedBatches(rows, labels, self.batch_size, self.kind, seed, device)
        else:
            batches = TrainBatches(rows, self.batch_size, self.kind, seed, self.device)
        optimizer, steps = adamw(network, candidate.learning_rate), candidate.epochs * len(batches)
        warmup = max(1, int(_WARMUP * steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
        )
        contrast = Contrast(head) if candidate.contrasts else None
        objective = RDropLoss(alpha=1.0) if candidate.r_drop else contrast
        loss = CrossEntropy(network, weights=balanced_weights(labels, head.out_features)) if self.balanced else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CoverageWarning)  # one layer is masked; the others do not matter
            provider = _ad_drop(self.ad_drop_layer) if candidate.ad_drop else None
            method = FineTuning(
                network, optimizer, provider, scheduler=schedule, loss_function=loss, objective=objective
            )
        for epoch in range(candidate.epochs):
            method.on_epoch(epoch)
            for batch in batches.epoch(epoch):
                method.step(batch)
                tick()
        if method.handle is not None:
            method.handle.detach()
        vars(network).pop("forward", None)  # back to float32, see `_set_precision`
        if contrast is not None:
            contrast.hook.remove()
        self.fit_at_end(candidate, network, train)
        self.observe((Clock.now() - began) / (self.slowness(candidate) * candidate.passes * len(train)))
        return network.eval()

    def fit_at_end(self, candidate: Try, network: nn.Module, train: NDArray[np.int64]) -> None:
        """Fit the head to the states that training has made of its rows, if a try ends so and has not diverged."""
        if candidate.ends_with_fit and all(bool(weight.isfinite().all()) for weight in network.parameters()):
            head, states, labels = self._head_inputs(network, self.encoded[candidate.max_length].rows.select(train))
            self._fit_head(head, states, labels, candidate.penalty if candidate.contrasts else _AT_END)

    def observe(self, seconds: float) -> None:
        """Update the seconds of a row by those of a training, because machines are busy at times."""
        self.seconds = seconds if math.isnan(self.seconds) else (self.seconds + seconds) / 2

    def logits(self, network: nn.Module, rows: Dataset) -> Logits:
        """Return the logits of encoded rows, ``(n, outputs)``."""
        return logits_of(network, to_score(rows, _AHEAD, self.kind, self.device), self.kind)

    def measure(self) -> None:
        """Measure the seconds of a row in training, and choose the fastest number of threads and precision.

        Some processors multiply bfloat16 twice as fast as float32, others much slower.
        """
        seconds = {1: self.seconds_with(1)}
        for threads in {(self.threads + 1) // 2, self.threads} - {1}:
            seconds[threads] = self.seconds_with(threads, slowest=min(seconds.values()))
        self.seconds, fastest = min((measured, threads) for threads, measured in seconds.items())
        torch.set_num_threads(fastest)
        if self.device.type == "cpu" and times_float32(torch.bfloat16) > 2:
            return  # without instructions for bfloat16, a step would take minutes
        self.in_bfloat16 = True
        try:
            in_bfloat16 = self.seconds_with(fastest, slowest=self.seconds)
        except RuntimeError:  # DeBERTa forbids positions by the lowest number of float32
            in_bfloat16 = math.inf
        self.in_bfloat16 = in_bfloat16 < self.seconds / _FASTER
        self.seconds = in_bfloat16 if self.in_bfloat16 else self.seconds

    @functools.cached_property
    def ad_drop_layer(self) -> int | None:
        """The lowest layer with attention, for AD-DROP, after a step of it; warn, and ``None``, if the step fails."""
        network = copy.deepcopy(self.model)
        self._set_precision(network)
        try:
            with warnings.catch_warnings(), draws_repeated(network):
                warnings.simplefilter("ignore", CoverageWarning)
                with attach(network, AttentionDropout(0.0)) as handle:
                    layer = min(site.layer for site in handle.sites)
                method = FineTuning(network, adamw(network, 1e-5), _ad_drop(layer))
                method.on_epoch(1)  # the first that is not plain
                method.step(self._measured_batches[-1])
        except InputError as error:
            reason = str(error).partition(". ")[0].rstrip(".")
            warnings.warn(f"AD-DROP is not tried: {reason}.", AttnRegWarning, stacklevel=2)
            return None
        return layer

    @functools.cached_property
    def _measured_batches(self) -> list[Batch]:
        """A few batches, without the first of an epoch, which has the longest texts."""
        batches = list(TrainBatches(self.encoded[0].rows, self.batch_size, self.kind, self.seed, self.device).epoch(0))
        step = max(1, len(batches) // _MEASURED)
        return batches[(step + 1) // 2 :: step] or batches

    @property
    def measured_rows(self) -> int:
        """The number of rows that a measurement trains on."""
        return sum(len(batch["labels"]) for batch in self._measured_batches)

    def seconds_with(self, threads: int, slowest: float = math.inf) -> float:
        """Measure the seconds of a row with some threads, by steps on a few batches; infinite if above ``slowest``.

        A first step does not count.
        """
        torch.set_num_threads(threads)
        network = copy.deepcopy(self.model)
        self._set_precision(network)
        method = FineTuning(network, adamw(network, 1e-5))
        float(method.step(self._measured_batches[-1]).loss)
        began = Clock.now()
        for batch in self._measured_batches:
            float(method.step(batch).loss)
            if Clock.now() - began > slowest * self.measured_rows:
                return math.inf
        return (Clock.now() - began) / self.measured_rows

    def _set_precision(self, network: nn.Module) -> None:
        """Let a network compute in bfloat16, if that is faster, and return numbers in float32."""
        if self.in_bfloat16:
            autocast = torch.autocast(self.device.type, torch.bfloat16)
            network.forward = convert_outputs_to_fp32(autocast(network.forward))

    def _head_inputs(
        self, network: nn.Module, rows: Dataset, paced: Paced = iter
    ) -> tuple[nn.Linear, torch.Tensor, NDArray[Any]]:
        """Return the head of a network, the states that the head reads of the rows, and the labels."""
        sorted_rows = to_score(rows, _AHEAD, self.kind, self.device)
        head, states, labels = head_and_features(network, paced(sorted_rows.batches))
        positions = np.argsort(sorted_rows.order)
        return head, states[positions], labels.cpu().numpy()[positions]

    def _fit_head(self, head: nn.Linear, states: torch.Tensor, labels: NDArray[Any], penalty: float) -> None:
        """Set a head to the logistic regression of classes, or the ridge regression of numbers, on its input states."""
        from sklearn.linear_model import LogisticRegression, Ridge

        biased, inputs = head.bias is not None, states.cpu().double().numpy()
        probe = Ridge(_RIDGE / penalty)
        if self.kind.has_classes:
            weights = "balanced" if self.balanced else None
            probe = LogisticRegression(C=penalty, max_iter=1000, fit_intercept=biased, class_weight=weights)
        # On one scale, so that one penalty suits all models.
        center, scale = inputs.mean(0) * biased, max(inputs.std(), 1e-6)
        fitted = probe.fit(((inputs - center) / scale).astype(np.float32), labels)
        weight = fitted.coef_ / scale
        put_into_head(head, weight, fitted.intercept_ - weight @ center, getattr(fitted, "classes_", None))

    def rescale(self, network: nn.Module, scale: float, center: float = 0.0) -> None:
        """Multiply the outputs of a network, and add a number to them, by its head."""
        head = self._head_inputs(network, self.encoded[0].rows.select(range(2)))[0]
        put_into_head(head, head.weight * scale, 0.0 if head.bias is None else head.bias * scale + center)


def _ad_drop(layer: int | None) -> ADDrop:
    return ADDrop(p=0.3, q=0.5, layers=None if layer is None else [layer])


def logits_of(network: nn.Module, rows: Labelled, kind: Kind) -> Logits:
    """Return the logits of rows, ``(n, outputs)``."""
    records = predict(network, rows, kind).records
    return np.array([record["logits"] if kind.has_classes else [record["prediction"]] for record in records])


def times_float32(dtype: torch.dtype) -> float:
    """Return the time of a matrix product in ``dtype`` on this CPU, over its time in float32: the best of six."""
    with torch.autocast("cpu", enabled=False):
        matrices = (torch.ones(256, 256, dtype=kind, device="cpu") for kind in (dtype, torch.float32))
        seconds, baseline = (min(timeit.repeat("x @ x", number=1, repeat=6, globals={"x": x})) for x in matrices)
    return seconds / baseline
