"""Find the randomness in a model, and whether a seed repeats it."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeGuard
from unittest import mock

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnreg.draws import generator_states
from attnreg.errors import InputError, listed, one_line
from attnreg.injection.attachment import handles
from attnreg.injection.discovery.example_inputs import whole_inputs
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

    faults: Sequence[str]  #: sentences, one per fault


def doctor(model: Any, inputs: Mapping[str, Any] | None = None, *, compiled: bool = False) -> Diagnosis:
    """Find the randomness in a model, and measure whether a seed repeats it.

    Makes six forward passes (two in eval mode) and two backward passes, and leaves the model, its gradients and all
    random states as before.

    Args:
        model: a model, in the mode in which it is about to run; or a Trainer of transformers.
        inputs: keyword arguments of its forward, with at least two rows; by default generated, if that is possible.
        compiled: also compile it, and compare its predictions in eval mode; slow.

    Returns:
        A table, which a notebook shows as HTML. It has a row for every module that draws random numbers, with its
        operations, its rate and the modes in which it draws, and for every normalization over the batch. Below are
        sentences: one per measurement, and one per fault.

    Raises:
        InputError: if the model is no module, or inputs that it takes cannot be generated.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        >>> diagnosis = doctor(model, {"input": torch.ones(2, 4)})
        >>> print(str(diagnosis).splitlines()[1])
        1       bernoulli_  0.1   train
        >>> diagnosis.faults
        []
    """
    model = getattr(model, "model", model) if hasattr(model, "train_dataset") else model
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected a model or a Trainer, got {type(model).__name__}.")
    faults = list(_asleep(model))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    try:
        model.zero_grad(set_to_none=True)
        with restored(model), put_back((*model.parameters(), *model.buffers())):
            passes = _on_generated(model) if inputs is None else _Passes(model, inputs)
            faults += passes.faults()
            rows, notes = passes.rows(), [*passes.notes(), *(_compiled(model, passes.inputs) if compiled else ())]
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
    heads = "module", "draws", "rate", "in"
    diagnosis = Diagnosis.of_rows([heads, *rows], [*notes, *(faults or ["No fault was found."])])
    diagnosis.faults = faults
    return diagnosis


@dataclass(frozen=True)
class Draw:
    """Random numbers that an operation drew while a module ran; ``checksum`` is of these numbers."""

    module: str
    operation: str
    rate: float | None
    checksum: int


class _Recorder(TorchDispatchMode):
    """Records every random operation, with the module that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.draws: list[Draw] = []
        self.returned: list[tuple[str, int]] = []  # names of modules and checksums of their outputs, in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            values = named(func, args, kwargs or {})
            rate = next((values[name] for name in ("dropout_p", "p") if isinstance(values.get(name), float)), None)
            if rate != 0.0:  # attention without dropout has this tag, too
                name = str(func.overloadpacket).partition(".")[2]
                if name == "bernoulli_" and rate is not None:
                    rate = 1 - rate  # its argument is the rate of keeping
                self.draws.append(Draw(self.running[-1] if self.running else "", name, rate, _checksum(output)))
        return output

    @contextmanager
    def naming(self, model: nn.Module) -> Iterator[None]:
        """Record within the block which module runs, and checksums of outputs."""

        def enter(name: str, *_: object) -> None:
            self.running.append(name)

        def leave(module: object, args: object, output: object) -> None:
            self.returned.append((self.running.pop(), _checksum(output)))

        with ExitStack() as stack:
            for name, module in model.named_modules():
                pre_hook = module.register_forward_pre_hook(functools.partial(enter, name), prepend=True)
                for hook in (pre_hook, module.register_forward_hook(leave, always_call=True)):
                    stack.callback(hook.remove)
            yield


def _checksum(output: Any) -> int:
    checksum = 0
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            checksum = zlib.crc32(data, checksum)
    return checksum


@dataclass(frozen=True)
class _Pass:
    """A forward pass: its draws, checksums of all modules' outputs in order, and its outputs."""

    draws: Sequence[Draw]
    returned: Sequence[tuple[str, int]]
    outputs: Sequence[Tensor]
    unseeded: Sequence[str]  # generators that it drew from, and that torch does not seed


@dataclass(frozen=True)
class _Backward:
    """A backward pass: the number of draws that it repeats, and the modules that draw other numbers in it.

    With checkpoints, ``gaps`` has, by parameter, the distance of the gradient to the gradient without checkpoints.
    """

    draws: int
    changing: Sequence[str]
    gaps: Mapping[str, float] | None

    def changed(self) -> list[str]:
        """Return the parameters whose gradients differ by more than rounding."""
        return [name for name, gap in (self.gaps or {}).items() if gap > _ROUNDING]


class _Passes:
    """The passes of a model, and the notes and faults that follow from them."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        with undisturbed(model, training=True):
            model.train()  # as in a training loop; a model may override this method
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
        states = generator_states()
        with recorder.naming(self.model), recorder:
            outputs = [output.detach() for output in _floats(self.model(**self.inputs))]
        unseeded = [name for name in UNSEEDED if generator_states()[name] != states[name]]
        parts = dict(self.model.named_modules())
        for handle in handles(self.model) if self.model.training else ():
            for name in handle.own_draws:
                part = name if name in parts else ""  # a dropout's draws are named after the module that holds it
                rates: list[float | None] = [child.p for child in parts[part].children() if _drops(child)]
                recorder.draws += [Draw(part, SEEDED, rate, 0) for rate in (rates or [None])]
        return _Pass(recorder.draws, recorder.returned, outputs, unseeded)

    def _backward(self) -> _Backward | None:
        """Make a pass forward and backward, and another without checkpoints."""
        recorder = _Recorder()
        with recorder.naming(self.model), recorder:
            losses = self._losses()
            if not losses:
                return None
            counts = Counter((draw.operation, draw.checksum) for draw in recorder.draws)
            recorder.draws = []
            torch.stack(losses).sum().backward()
        counts.subtract((draw.operation, draw.checksum) for draw in recorder.draws)
        changing = [draw.module or "the model" for draw in recorder.draws if counts[draw.operation, draw.checksum] < 0]
        return _Backward(len(recorder.draws), list(dict.fromkeys(changing)), self._gaps())

    def _losses(self) -> list[Tensor]:
        set_seed(_SEEDS[0])
        outputs = _floats(self.model(**self.inputs))
        return [output.float().square().mean() for output in outputs if output.requires_grad]

    def _gaps(self) -> dict[str, float] | None:
        """Return by parameter how far the gradient is from the one without checkpoints, as a share of the latter."""
        repeated = self._gradients()
        self.model.zero_grad(set_to_none=True)
        with _without_checkpoints() as skipped:
            torch.stack(self._losses()).sum().backward()
        if not skipped:
            return None
        plain = self._gradients()
        sizes = {name: float(grad.abs().max()) for name, grad in plain.items()}
        least = _SMALL * max(sizes.values(), default=0.0) or 1.0
        gaps = {name: float((repeated[name] - grad).abs().max()) for name, grad in plain.items()}
        return {name: gap / max(sizes[name], least) for name, gap in gaps.items()}

    def _gradients(self) -> dict[str, Tensor]:
        trained = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in trained}

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return a row for every module that is random or depends on the mode."""
        rows = []
        drawing: dict[str, list[Draw]] = {}
        for draw in (*self.train.draws, *self.eval.draws):
            drawing.setdefault(draw.module, []).append(draw)
        for name, module in self.model.named_modules():
            if name in drawing:
                rates = dict.fromkeys(f"{draw.rate:g}" for draw in drawing[name] if draw.rate is not None)
                passes = {"train": self.train, "eval": self.eval}
                modes = [mode for mode in passes if any(draw.module == name for draw in passes[mode].draws)]
                operations = dict.fromkeys(draw.operation for draw in drawing[name])
                rows.append((name or "the model", ", ".join(operations), ", ".join(rates), ", ".join(modes)))
            elif any(draw.operation == SEEDED for draw in drawing.get(name.rpartition(".")[0], ())):
                continue
            elif _drops(module):
                rows.append((name, "nothing in these passes", f"{module.p:g}", ""))
            elif isinstance(module, _BatchNorm):
                rows.append((name, "nothing; statistics of the batch", "", "train"))
        return rows

    def notes(self) -> Iterator[str]:
        """Yield a sentence for every measurement."""
        config = getattr(self.model, "config", None)
        if kernel := getattr(config, "_attn_implementation", None):
            yield f"Attention runs in {kernel}."
        repeats = _equal(self.train, self.again)
        yield f"Two passes of one seed in training mode {'are equal' if repeats else 'differ'}."
        if self.repeated is None:
            yield "No gradient flows from the outputs, so no backward pass was made."
        elif self.repeated.gaps is not None:
            functions = [vars(module).get("_gradient_checkpointing_func") for module in self.model.modules()]
            options = next((getattr(function, "keywords", {}) for function in functions if function is not None), {})
            shown = "".join(f", {name}={value}" for name, value in options.items())
            yield f"The backward pass repeats {self.repeated.draws} draws (gradient checkpointing{shown})."
            if repeats:  # otherwise, gradients differ from pass to pass anyway
                most = max(self.repeated.gaps.values(), default=0.0)
                yield f"Its gradients differ by {most:.1%} at most from those without gradient checkpointing."
        weights = [[*module.parameters(recurse=False)] for module in self.model.modules()]
        frozen = sum(not any(p.requires_grad for p in of_module) for of_module in weights if of_module)
        if frozen:
            yield f"Of {sum(map(bool, weights))} modules with weights, {frozen} are frozen."
        first = [outputs[0].float() for outputs in (self.train.outputs, self.eval.outputs) if outputs]
        if len(first) == 2 and first[0].dim() > 1 and first[0].shape == first[1].shape:
            gap = (first[0].log_softmax(-1) - first[1].log_softmax(-1)).abs()
            yield (
                f"The log-probabilities of its first output differ by {float(gap.max()):.2g} at most between training "
                f"and eval mode, and by {float(gap.mean()):.2g} on average."
            )

    def faults(self) -> Iterator[str]:
        """Yield a sentence for every fault."""
        if names := self.awake:
            yield f"In training mode after `model.eval()`: {listed(names, MOST)}. Its `train` ignores the mode."
        if names := [*dict.fromkeys(draw.module or "the model" for draw in self.eval.draws)]:
            yield f"Random in eval mode: {listed(names, MOST)}. Pass `training=self.training` to its dropout."
        elif not _equal(self.eval, self.eval_again):
            where = _first_difference(self.eval, self.eval_again)
            yield f"Two passes in eval mode differ, first in {where}: it keeps a state, or draws from elsewhere."
        if owners := [*dict.fromkeys([*self.train.unseeded, *self.eval.unseeded])]:
            yield f"Numbers come from {' and '.join(owners)} generator, which `torch.manual_seed` does not seed."
        if not _equal(self.train, self.again):
            where = _first_difference(self.train, self.again)
            yield f"Two passes of one seed differ, first in {where}: it keeps a state, or has a generator of its own."
        if self.repeated is not None and (names := [*self.repeated.changing]):
            yield (
                f"Gradient checkpointing draws other numbers when it repeats {listed(names, MOST)}, so gradients are "
                "wrong. Remove `preserve_rng_state=False`."
            )
        elif self.repeated is not None and _equal(self.train, self.again) and (names := self.repeated.changed()):
            yield (
                f"Gradient checkpointing changes the gradients of {listed(names, MOST)}: what it repeats keeps a "
                "state, draws from elsewhere, asks whether gradients are on, or gets no input with gradients."
            )
        yield from self.frozen


def _on_generated(model: nn.Module) -> _Passes:
    """Make the passes with the first generated inputs that the model takes."""
    problems = list[str]()
    for inputs in whole_inputs(model):
        try:
            return _Passes(model, inputs)
        except Exception as error:  # noqa: PERF203 (from anywhere in the model)
            problems.append(f" ({type(error).__name__}: {one_line(error)})")
    raise InputError(
        f"Cannot make inputs for {type(model).__name__}{''.join(problems[:1])}: pass `inputs`, the arguments of its "
        "forward, to `attnreg.doctor`."
    )


def _asleep(model: nn.Module) -> Iterator[str]:
    """Name dropout that does nothing because its module was left in eval mode."""
    modules = model.named_modules() if model.training else ()
    if names := [name for name, module in modules if _drops(module) and not module.training]:
        yield f"In eval mode while the model trains, so that dropout does nothing: {listed(names, MOST)}."


def _drops(module: nn.Module) -> TypeGuard[_DropoutNd]:
    return isinstance(module, _DropoutNd) and module.p > 0


def _frozen_statistics(model: nn.Module) -> Iterator[str]:
    """Name normalizations over the batch whose statistics move although their weights are frozen."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        moving = {name: module for name, module in model.named_modules()
                  if isinstance(module, _BatchNorm) and module.training and module.track_running_stats}  # fmt: skip
        if names := [name for name, norm in moving.items() if not any(p.requires_grad for p in norm.parameters())]:
            yield f"Frozen, but running statistics move in training mode: {listed(names, MOST)}. Keep it in eval mode."


@contextmanager
def _without_checkpoints() -> Iterator[list[object]]:
    """Let torch's gradient checkpointing run its functions only once within the block; yield a list of them."""
    functions: list[object] = []

    def once(function: object, *_: object, **__: object) -> Iterator[None]:
        functions.append(function)
        yield

    def apply(function: Any, preserve: object, *args: object) -> Any:
        functions.append(function)
        return function(*args)

    names = (f"_checkpoint_without_reentrant_generator{end}" for end in ("_impl", ""))  # the first since torch 2.14
    generator: dict[str, Any] = {next(name for name in names if hasattr(checkpoint, name)): once}
    with mock.patch.multiple(checkpoint, CheckpointFunction=SimpleNamespace(apply=apply), **generator):
        yield functions


def _compiled(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on the difference of a compiled model in eval mode."""
    with undisturbed(model), torch.no_grad():
        pairs = zip(_floats(model(**inputs)), _floats(torch.compile(model)(**inputs)), strict=True)
        gap = max(float((a - b).abs().max()) for a, b in pairs)
    yield f"Compiled and eager outputs in eval mode differ by {gap:.2g} at most."


def _floats(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _equal(a: _Pass, b: _Pass) -> bool:
    outputs = [[output.nan_to_num() for output in outputs] for outputs in (a.outputs, b.outputs)]
    return len(outputs[0]) == len(outputs[1]) and all(map(torch.equal, *outputs))


def _first_difference(a: _Pass, b: _Pass) -> str:
    """Return the innermost module whose output differs first."""
    pairs = zip(a.returned, b.returned, strict=False)
    return next((mine[0] for mine, other in pairs if mine != other), "") or "the model"
