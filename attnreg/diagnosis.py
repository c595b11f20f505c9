"""What is random in a model, what of it repeats, and what does not."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from attnreg.draws import generator_states
from attnreg.errors import InputError, listed
from attnreg.injection.attachment import handles
from attnreg.injection.discovery.example_inputs import example_inputs
from attnreg.injection.discovery.rules import named
from attnreg.injection.discovery.snapshot import put_back, restored, undisturbed
from attnreg.injection.report import Report

MOST = 4  # modules to name in a sentence
UNSEEDED = "Python's", "numpy's"  # generators that torch does not seed
SEEDED = "from the seed of the pass"
_SEEDS = 0, 1
_ROUNDING = 0.1  # a gradient's relative error in bfloat16, at most
_SMALL = 1e-3  # a gradient below this share of the largest may be rounding, as that of a bias of keys


class Diagnosis(Report):
    """A table with a row per module that is random or depends on the mode, sentences below, and :attr:`faults`."""

    __slots__ = ("faults",)

    faults: Sequence[str]  #: what is wrong, a sentence each

    @classmethod
    def of(cls, rows: Sequence[Sequence[str]], notes: Sequence[str], faults: Sequence[str]) -> Self:
        """Make the report."""
        made = cls.of_rows(rows, [*notes, *faults] if faults else [*notes, "No fault was found."])
        made.faults = faults
        return made


def doctor(model: Any, inputs: Mapping[str, Any] | None = None, *, compiled: bool = False) -> Diagnosis:
    """Find what is random in a model, and measure what of it repeats.

    Makes six forward passes (two in eval mode) and two backward passes, and leaves the model, its gradients and all
    random states as they were.

    Args:
        model: a model, in the mode in which it is about to run; or a Trainer of transformers.
        inputs: keyword arguments of its forward, with at least two rows; by default made for it, if that is possible.
        compiled: also compile it, and compare its predictions in eval mode; slow.

    Returns:
        A table, which a notebook shows as HTML: of each module that draws random numbers, the operations, the rate and
        whether it also draws in eval mode, and each normalization over the batch. Below it is a sentence for each
        measurement, and for each fault.

    Raises:
        InputError: if the model is none, or inputs cannot be made.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        >>> found = doctor(model, {"input": torch.ones(2, 4)})
        >>> print(str(found).splitlines()[1])
        1       bernoulli_  0.1   train
        >>> found.faults
        []
    """
    model = getattr(model, "model", model) if hasattr(model, "train_dataset") else model
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected a model or a Trainer, got {type(model).__name__}.")
    if inputs is None and not (made := example_inputs(model)):
        raise InputError(f"Cannot make inputs for {type(model).__name__}: pass `inputs`, the arguments of its forward.")
    inputs = made[0] if inputs is None else inputs
    faults = list(_asleep(model))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    try:
        model.zero_grad(set_to_none=True)
        with restored(model), put_back((*model.parameters(), *model.buffers())):
            found = _Found(model, inputs)
            faults += found.faults()
            rows, notes = found.rows(), [*found.notes(), *(_compiled(model, inputs) if compiled else ())]
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
    return Diagnosis.of([("module", "draws", "rate", "in"), *rows], notes, faults)


@dataclass(frozen=True)
class Draw:
    """Random numbers that an operation gave while a module ran; ``bits`` is a checksum of them."""

    module: str
    operation: str
    rate: float | None
    bits: int


class _Recorder(TorchDispatchMode):
    """Records each random operation, with the module that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.draws: list[Draw] = []
        self.returned: list[tuple[str, int]] = []  # a checksum of what each module returned, in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = named(func, args, kwargs or {})
            rate = next((given[name] for name in ("dropout_p", "p") if isinstance(given.get(name), float)), None)
            if rate != 0.0:  # attention without dropout has this tag, too
                name = str(func.overloadpacket).partition(".")[2]
                if name == "bernoulli_" and rate is not None:
                    rate = 1 - rate  # it is that of keeping
                self.draws.append(Draw(self.running[-1] if self.running else "", name, rate, _bits(output)))
        return output

    @contextmanager
    def naming(self, model: nn.Module) -> Iterator[None]:
        """Know which module runs, and what it returns, within the block."""

        def enter(name: str, *_: object) -> None:
            self.running.append(name)

        def leave(module: object, args: object, output: object) -> None:
            self.returned.append((self.running.pop(), _bits(output)))

        with ExitStack() as stack:
            for name, module in model.named_modules():
                before = module.register_forward_pre_hook(functools.partial(enter, name), prepend=True)
                for hook in (before, module.register_forward_hook(leave, always_call=True)):
                    stack.callback(hook.remove)
            yield


def _bits(output: Any) -> int:
    found = 0
    for each in tree_leaves(output):
        if isinstance(each, Tensor):
            found = zlib.crc32(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(), found)
    return found


@dataclass(frozen=True)
class _Pass:
    """A forward pass: what it drew, what each module returned (a checksum, in order), what it returned itself."""

    draws: Sequence[Draw]
    returned: Sequence[tuple[str, int]]
    outputs: Sequence[Tensor]
    others: Sequence[str]  # further sources that it drew from


@dataclass(frozen=True)
class _Backward:
    """A backward pass: how many draws it repeats, and the modules that then draw others.

    With checkpoints, ``gaps`` has the distance of each parameter's gradient to the one without them.
    """

    draws: int
    others: Sequence[str]
    gaps: Mapping[str, float] | None

    def changed(self) -> list[str]:
        """Return the parameters whose gradients differ by more than rounding."""
        return [name for name, gap in (self.gaps or {}).items() if gap > _ROUNDING]


class _Found:
    """The passes of a model, and what they show."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        with undisturbed(model, training=True):
            model.train()  # as a training loop does, whatever the model does in it
            self.frozen = list(_frozen_statistics(model))
            self.train = self._pass(_SEEDS[0])
            self.again = self._pass(_SEEDS[0])
            self.repeated = self._backward()
        with undisturbed(model):
            model.eval()
            self.awake = [name for name, module in model.named_modules() if module.training]
            self.eval, self.eval_again = (self._pass(seed) for seed in _SEEDS)

    def _pass(self, seed: int) -> _Pass:
        recorder = _Recorder()
        set_seed(seed)
        before = generator_states()
        with recorder.naming(self.model), recorder:
            outputs = [each.detach() for each in _floats(self.model(**self.inputs))]
        others = [name for name in UNSEEDED if generator_states()[name] != before[name]]
        parts = dict(self.model.named_modules())
        for handle in handles(self.model) if self.model.training else ():
            for name in handle.own_draws:
                part = name if name in parts else ""  # a dropout's draws are named after the module that holds it
                held: list[float | None] = [
                    each.p for each in parts[part].children() if isinstance(each, _DropoutNd) and each.p > 0
                ]
                recorder.draws += [Draw(part, SEEDED, rate, 0) for rate in (held or [None])]
        return _Pass(recorder.draws, recorder.returned, outputs, others)

    def _backward(self) -> _Backward | None:
        """Make a pass forward and backward, and another without checkpoints."""
        recorder = _Recorder()
        with recorder.naming(self.model), recorder:
            losses = self._losses()
            if not losses:
                return None
            left = Counter((draw.operation, draw.bits) for draw in recorder.draws)
            recorder.draws = []
            torch.stack(losses).sum().backward()
        left.subtract((draw.operation, draw.bits) for draw in recorder.draws)
        others = [draw.module or "the model" for draw in recorder.draws if left[draw.operation, draw.bits] < 0]
        return _Backward(len(recorder.draws), list(dict.fromkeys(others)), self._gaps())

    def _losses(self) -> list[Tensor]:
        set_seed(_SEEDS[0])
        outputs = [each for each in _floats(self.model(**self.inputs)) if each.requires_grad]
        return [each.float().square().mean() for each in outputs]

    def _gaps(self) -> dict[str, float] | None:
        """Return how far each parameter's gradient is from the one without checkpoints, as a share of this one."""
        repeated = self._gradients()
        self.model.zero_grad(set_to_none=True)
        with _without_checkpoints() as skipped:
            torch.stack(self._losses()).sum().backward()
        if not skipped:
            return None
        plain = self._gradients()
        sizes = {name: float(each.abs().max()) for name, each in plain.items()}
        least = _SMALL * max(sizes.values(), default=0.0) or 1.0
        return {
            name: float((repeated[name] - each).abs().max()) / max(sizes[name], least) for name, each in plain.items()
        }

    def _gradients(self) -> dict[str, Tensor]:
        weights = ((name, each) for name, each in self.model.named_parameters() if each.requires_grad)
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in weights}

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return a row for each module that is random or depends on the mode."""
        rows = []
        drawing: dict[str, list[Draw]] = {}
        for draw in (*self.train.draws, *self.eval.draws):
            drawing.setdefault(draw.module, []).append(draw)
        for name, module in self.model.named_modules():
            if name in drawing:
                rates = dict.fromkeys(f"{draw.rate:g}" for draw in drawing[name] if draw.rate is not None)
                modes = [mode for mode, each in (("train", self.train), ("eval", self.eval))
                         if any(draw.module == name for draw in each.draws)]  # fmt: skip
                operations = dict.fromkeys(draw.operation for draw in drawing[name])
                rows.append((name or "the model", ", ".join(operations), ", ".join(rates), ", ".join(modes)))
            elif any(draw.operation == SEEDED for draw in drawing.get(name.rpartition(".")[0], ())):
                continue
            elif isinstance(module, _DropoutNd) and module.p > 0:
                rows.append((name, "nothing in these passes", f"{module.p:g}", ""))
            elif isinstance(module, _BatchNorm):
                rows.append((name, "nothing; statistics of the batch", "", "train"))
        return rows

    def notes(self) -> Iterator[str]:
        """Say what was measured."""
        config = getattr(self.model, "config", None)
        if kernel := getattr(config, "_attn_implementation", None):
            yield f"Attention runs in {kernel}."
        same = _equal(self.train, self.again)
        yield f"Two passes of one seed in training mode {'are equal' if same else 'differ'}."
        if self.repeated is None:
            yield "No gradient flows from the outputs, so no backward pass was made."
        elif self.repeated.gaps is not None:
            kinds = [vars(each).get("_gradient_checkpointing_func") for each in self.model.modules()]
            given = next((getattr(each, "keywords", {}) for each in kinds if each is not None), {})
            shown = "".join(f", {name}={value}" for name, value in given.items())
            yield f"The backward pass repeats {self.repeated.draws} draws (gradient checkpointing{shown})."
            if same:  # or gradients differ from pass to pass anyway
                most = max(self.repeated.gaps.values(), default=0.0)
                yield f"Its gradients differ by {most:.1%} at most from those without gradient checkpointing."
        weights = [[*each.parameters(recurse=False)] for each in self.model.modules()]
        frozen = sum(not any(p.requires_grad for p in some) for some in weights if some)
        if frozen:
            yield f"Of {sum(map(bool, weights))} modules with weights, {frozen} are frozen."
        first = [each.outputs[0].float() for each in (self.train, self.eval) if each.outputs]
        if len(first) == 2 and first[0].dim() > 1 and first[0].shape == first[1].shape:
            gap = (first[0].log_softmax(-1) - first[1].log_softmax(-1)).abs()
            yield (
                f"The log-probabilities of its first output differ by {float(gap.max()):.2g} at most between training "
                f"and eval mode, and by {float(gap.mean()):.2g} on average."
            )

    def faults(self) -> Iterator[str]:
        """Say what is wrong, a sentence each."""
        if found := self.awake:
            yield f"In training mode after `model.eval()`: {listed(found, MOST)}. Its `train` ignores the mode."
        if found := [*dict.fromkeys(draw.module or "the model" for draw in self.eval.draws)]:
            yield f"Random in eval mode: {listed(found, MOST)}. Pass `training=self.training` to its dropout."
        elif not _equal(self.eval, self.eval_again):
            where = _first_difference(self.eval, self.eval_again)
            yield f"Two passes in eval mode differ, first in {where}: it keeps a state, or draws from elsewhere."
        if found := [*dict.fromkeys([*self.train.others, *self.eval.others])]:
            yield f"Numbers come from {' and '.join(found)} generator, which `torch.manual_seed` does not seed."
        if not _equal(self.train, self.again):
            where = _first_difference(self.train, self.again)
            yield f"Two passes of one seed differ, first in {where}: it keeps a state, or has a generator of its own."
        if self.repeated is not None and (found := [*self.repeated.others]):
            yield (
                f"Gradient checkpointing draws other numbers when it repeats {listed(found, MOST)}, so gradients are "
                "wrong. Remove `preserve_rng_state=False`."
            )
        elif self.repeated is not None and _equal(self.train, self.again) and (found := self.repeated.changed()):
            yield (
                f"Gradient checkpointing changes the gradients of {listed(found, MOST)}: what it repeats keeps a "
                "state, draws from elsewhere, asks whether gradients are on, or gets no input with gradients."
            )
        yield from self.frozen


def _asleep(model: nn.Module) -> Iterator[str]:
    """Say which dropout does nothing because its module was left in eval mode."""
    modules = model.named_modules() if model.training else ()
    if found := [name for name, each in modules if isinstance(each, _DropoutNd) and each.p > 0 and not each.training]:
        yield f"In eval mode while the model trains, so that dropout does nothing: {listed(found, MOST)}."


def _frozen_statistics(model: nn.Module) -> Iterator[str]:
    """Say which normalizations over the batch move although their weights are frozen."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        moving = {name: module for name, module in model.named_modules()
                  if isinstance(module, _BatchNorm) and module.training and module.track_running_stats}  # fmt: skip
        if found := [name for name, each in moving.items() if not any(p.requires_grad for p in each.parameters())]:
            yield f"Frozen, but running statistics move in training mode: {listed(found, MOST)}. Keep it in eval mode."


@contextmanager
def _without_checkpoints() -> Iterator[list[object]]:
    """Let torch's gradient checkpointing run what it is given, once, within the block; the list has its functions."""
    given: list[object] = []

    def once(function: object, *_: object, **__: object) -> Iterator[None]:
        given.append(function)
        yield

    def apply(function: Any, preserve: object, *args: object) -> Any:
        given.append(function)
        return function(*args)

    names = (f"_checkpoint_without_reentrant_generator{end}" for end in ("_impl", ""))  # the first since torch 2.14
    generator: dict[str, Any] = {next(name for name in names if hasattr(checkpoint, name)): once}
    with mock.patch.multiple(checkpoint, CheckpointFunction=SimpleNamespace(apply=apply), **generator):
        yield given


def _compiled(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Say how far a compiled model differs in eval mode."""
    with undisturbed(model), torch.no_grad():
        pairs = zip(_floats(model(**inputs)), _floats(torch.compile(model)(**inputs)), strict=True)
        gap = max(float((a - b).abs().max()) for a, b in pairs)
    yield f"Compiled and eager outputs in eval mode differ by {gap:.2g} at most."


def _floats(output: Any) -> list[Tensor]:
    return [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]


def _equal(a: _Pass, b: _Pass) -> bool:
    outputs = [[each.nan_to_num() for each in found.outputs] for found in (a, b)]
    return len(outputs[0]) == len(outputs[1]) and all(map(torch.equal, *outputs))


def _first_difference(a: _Pass, b: _Pass) -> str:
    """Return the innermost module that first returned something else."""
    pairs = zip(a.returned, b.returned, strict=False)
    return next((mine[0] for mine, other in pairs if mine != other), "") or "the model"
