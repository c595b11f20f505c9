"""The forward passes of an attached model, and what the provider is given and asked in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from attnreg.draws import Draws, draws_from, new_seed
from attnreg.errors import AsleepWarning
from attnreg.functional.seeded import is_traced
from attnreg.injection.backends import Tap
from attnreg.injection.discovery.coverage import why_hidden
from attnreg.injection.running.changes import Changes
from attnreg.injection.running.forward_pass import Padding, Pass
from attnreg.injection.running.own_draws import OwnDraws
from attnreg.injection.running.rates import DropRates
from attnreg.injection.running.repetition import (
    Calls,
    Computations,
    MaskedCalls,
    in_backward,
    in_checkpoint,
    in_hook,
    mark,
    waiting,
)
from attnreg.injection.running.seeds import Place, Seeds
from attnreg.regularizer.abilities import PATIENCE, Watch, that_look_at_batches
from attnreg.regularizer.base import Regularizer
from attnreg.sites import Site

WAS_PLAIN = (
    "{} cannot mask a forward pass that repeats one without gradients, because that one was not masked. Do not use "
    "cached losses (GradCache), and use gradient checkpointing with `use_reentrant=False`."
)


class Passes:
    """What the replaced forwards of an attached model share: the provider, and the forward pass that is running.

    It acts at ``modules``; ``padding`` makes the masks of a pass from its inputs and the names of all inputs.
    """

    def __init__(
        self, model: nn.Module, provider: Regularizer, modules: Sequence[nn.Module], padding: Callable[..., Padding]
    ) -> None:
        self.provider = provider
        self.latest = Pass()
        self._masked = Pass()  # the latest in which the provider acts
        self.mode: object = None  # the mode of the innermost attention module that is running
        self.rates = DropRates()
        self.seeds = Seeds()
        self.masked_calls = MaskedCalls(provider)
        self.enabled = True
        self.probing = False
        self.taps: Mapping[str, Tap] = {}
        self.tapped_inputs: dict[str, Tensor] = {}
        self.why_hidden = why_hidden(model)
        self.model = model
        self._modules = tuple(modules)
        self._padding = padding
        self._calls: list[Calls] = []
        self._paddings: Computations[Padding] = Computations()
        self._has_trained = False  # whether any pass so far had gradients
        self._had_gradients = False  # whether the latest in training mode had
        self._watch = Watch(provider)
        self._steps_alone = 0  # since the latest training pass
        self.attached = True
        self.changes = Changes(model, (), {})
        self.seeds_own = False  # whether the model's own randomness follows from the seed of a pass
        self.own: OwnDraws | None = None  # draws the model's own randomness, while it runs
        self.rows: Tensor | None = None  # index of each sample in a larger batch
        self._has_drawn = False
        self._to_repeat: list[OwnDraws] = []  # of the passes in the checkpoint that is repeated now

    @property
    def in_forward(self) -> bool:
        """Whether a forward pass is running."""
        return self.latest.is_running

    @property
    def active(self) -> bool:
        """Whether masks are enabled and the provider is in training mode and active."""
        return self.enabled and self.provider.training and self.provider.active

    def acts_on(self, module: nn.Module) -> bool:
        """Whether the provider masks a module that runs now: it must be in training mode, in a pass with gradients."""
        if self.probing:
            return self.active
        return module.training and self.active and self.latest.has_gradients

    def acts_at(self, place: Hashable, name: str, module: nn.Module) -> bool:
        """Whether a call of a module is masked; if gradient checkpointing repeats it, whether it was."""
        acts = self.acts_on(module)
        if in_backward():
            return self.masked_calls.again(place, name, module, acts=acts)
        self.masked_calls.note(place, module, acts=acts, has_gradients=self.latest.has_gradients)
        return acts

    @contextmanager
    def having(self, **settings: Any) -> Iterator[None]:
        """Set attributes within the block, in which no pass from outside goes on."""
        before = {name: getattr(self, name) for name in settings}
        vars(self).update(settings)
        self.latest.is_open = False
        try:
            yield
        finally:
            vars(self).update(before)
            self.latest.is_open = False

    def counted(self, number: int) -> Calls:
        """Return a counter of a module's calls, which begins anew with each pass."""
        self._calls.append(Calls(number))
        return self._calls[-1]

    def begin(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str], *, whole: bool = True) -> None:
        """Begin a forward pass of the model, or of a module in it, which may not contain the ``whole`` attention."""
        padding = self._padding(inputs, names)
        now = self.latest = Pass(
            module, whole, not whole, with_gradients=torch.is_grad_enabled(), is_running=True, padding=padding
        )
        if self.seeds_own or self.rows is not None:
            now.batch = padding.batch(inputs, self.rows)
        if self.taps and not self.tapped_inputs:
            self.tapped_inputs = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if self.acts_on(module) and in_hook() and not self._had_gradients:
            raise RuntimeError(WAS_PLAIN.format(type(self.provider).__name__))
        if now.with_gradients:  # set without being read, or compiled code would be compiled again for the second pass
            self._has_trained = True
        if module.training and not in_hook():
            self._had_gradients = now.with_gradients
        for calls in self._calls:
            calls.begin()
        training = module.training and now.with_gradients
        if training or self.probing:
            self.rates.clear()
        if training and self.enabled:
            self._watch.training_pass()
            self._steps_alone = 0
        if self._acts():
            if not torch.compiler.is_compiling():
                self.changes.check_modules()
            self._check_trace()
            self._masked = now
            with draws_from(self.seeds.begin(now)), self.asking():
                if self.acts_on(module) and (whole or not self._drawing_in_prepare()):
                    self.provider.prepare(inputs)

    def _check_trace(self) -> None:
        """Raise if the pass is recorded, and what is recorded would not draw masks of its own."""
        if torch.compiler.is_exporting() and (looking := that_look_at_batches(self.provider)):
            raise RuntimeError(
                f"{type(looking[0]).__name__} makes its masks for one batch, so torch.export cannot export them. "
                "Export in eval mode, or within `handle.disabled()`."
            )
        if torch.compiler.is_compiling():
            return
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        records = torch._C._get_tracing_state() is not None or get_proxy_mode() is not None
        if captures or records or is_fx_symbolic_tracing():
            raise RuntimeError(
                "torch.jit.trace, torch.fx and CUDA graphs would repeat the masks of this forward pass in each call. "
                "Record the model in eval mode, within `handle.disabled()`, or with `torch.export` or `torch.compile`."
            )

    def go_on(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str], *, begins: bool) -> None:
        """Go on with a pass that consists of parts of the model, or begin another (if this part has run in it)."""
        now = self.latest
        if begins or not now.is_open or now.with_gradients != torch.is_grad_enabled():
            self.begin(inputs, module, names, whole=False)
        else:
            if self._acts() and not torch.compiler.is_compiling():
                self.changes.check_modules()
            now.is_running, now.padding = True, self._padding(inputs, names)
            if self.seeds_own or self.rows is not None:
                now.batch = now.padding.batch(inputs, self.rows)

    def end(self, *, completed: bool = False) -> None:
        """End the forward pass, or what is called now of a pass that may go on in another part of the model."""
        now = self.latest
        if now.whole and self._acts():
            self.seeds.end(self._masked)
        now.is_running, now.padding = False, None
        now.is_open &= completed
        if torch.compiler.is_exporting():  # no pass has run: its seed and rates are those of no numbers
            self.latest, self._masked, self.seeds.latest = Pass(), Pass(), None
            self.rates.forget()
            return
        if completed and not torch.compiler.is_compiling():
            self._check_ran()

    def _check_ran(self) -> None:
        """Check once after a whole pass, or if it was compiled, in :meth:`step`."""
        now = self.latest
        if now.whole and now is self._masked and not now.is_checked:
            now.is_checked = True
            self.changes.check_ran(self.acts_on)

    @contextmanager
    def repeated(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Repeat a forward pass within a backward pass; raise if it would be masked, and the first one was not."""
        now = self.latest
        is_latest = now.whole and now.module is module
        if is_latest:
            now.padding = self._padding(inputs, names)
            if now is self._masked:
                self.seeds.repeat(self._masked)
        if self.acts_on(module) and not self._has_trained:
            raise RuntimeError(WAS_PLAIN.format(type(self.provider).__name__))
        try:
            yield
        finally:
            if is_latest:
                now.padding = None
                if now is self._masked:
                    self.seeds.end(self._masked)

    def _acts(self) -> bool:
        """Whether the provider masks any module."""
        return any(self.acts_on(module) for module in self._modules)

    @contextmanager
    def own_draws(self) -> Iterator[OwnDraws | None]:
        """Draw the model's own randomness within the block from the seed of the pass; in its repetition, again."""
        if not in_backward():
            now = self.latest
            draws, seed = now.seed is None, self.seeds.of_pass(now)
            assert now.batch is not None
            mode = OwnDraws(self, seed if is_traced() else int(seed), now.batch, now.own_counts, drew=draws)
        elif self._to_repeat:
            mode = self._to_repeat.pop(0).copied()
            if mode.drew:
                new_seed()  # so that the generator is where it was
        else:
            yield None
            return
        mode.begin(self._repeat)
        mode.is_first, self._has_drawn = not self._has_drawn, True
        with mode.active():
            yield mode

    def _repeat(self, mode: OwnDraws, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a checkpoint around a pass again."""
        before, self._to_repeat = self._to_repeat, [mode, *self._to_repeat]
        try:
            return run(*args, **kwargs)
        finally:
            self._to_repeat = before

    @contextmanager
    def asking(self, device: torch.device | None = None) -> Iterator[None]:
        """Check within the block, in which the provider is asked, that masks that are repeated can be."""
        own = self.own
        if own is not None:
            own.paused = True
        try:
            with self.seeds.asking(self.provider, device):
                yield
        finally:
            if own is not None:
                own.paused = False

    def draws_at(self, site: Site, place: Place) -> Draws:
        """Return the source of what is drawn now at a place."""
        waits = self._drawing_in_prepare()
        return self.seeds.of(
            self._masked,
            site,
            place,
            has_gradients=self.latest.has_gradients,
            only_latest=type(waits[0]).__name__ if waits else None,
        )

    def padding_at(self, site: Site) -> Padding:
        """Return the padding masks of the pass that computes hidden states now."""
        padding, repeats = self.latest.padding, in_backward()
        if padding is None and repeats:
            return self._padding_again(site)
        padding = padding or Padding()
        if self.latest.has_gradients and not (repeats or is_traced()) and in_checkpoint():
            self._paddings.note(site.label, mark(), padding)
        return padding

    def _padding_again(self, site: Site) -> Padding:
        found = waiting(self._paddings.candidates(site.label)[0])
        if not found:
            return Padding()
        if not all(each.what.same(found[0].what) for each in found):
            raise RuntimeError(
                f"Gradient checkpointing repeats {site.name}, and any of {len(found)} forward passes with different "
                "padding may be the one: run the backward pass of each forward pass before the next, or call "
                "`handle.step()` after each optimizer step."
            )
        found[-1].repeated = True
        return found[-1].what

    def step(self) -> None:
        """Advance the provider's schedules, and forget what can no longer be repeated."""
        if self._acts():
            self.changes.check_modules()
            self._check_ran()
        self.provider.step()
        self.latest.is_open = False
        self._steps_alone += 1
        if self._steps_alone == PATIENCE and self.enabled:
            why = self.why_plain() or (
                "Attach to the model that you train (a copy from before is not attached), and call it or its parts."
            )
            text = f"{type(self.model).__name__} had no training pass in {PATIENCE} optimizer steps. {why}"
            warnings.warn(text, AsleepWarning, stacklevel=3)
        self.seeds.forget()
        self.masked_calls.forget()
        self._paddings.forget()

    def why_plain(self) -> str | None:
        """Return why a pass would not be masked now, or the latest was not, with the fix; ``None`` if unknown."""
        asleep = [type(each).__name__ for each in self.provider.parts() if not each.active]
        reasons = {
            "The regularizer is detached.": not self.attached,
            "Masks are off within `handle.disabled()`.": not self.enabled,
            "The regularizer is in eval mode: call `provider.train()`.": not self.provider.training,
            f"{', '.join(asleep)} does not act in this epoch: see `provider.on_epoch`.": bool(self._modules)
            and not self.provider.active,
            "The model is in eval mode: call `model.train()`.": not any(each.training for each in self._modules),
            "The latest forward pass had no gradients: call the model outside `torch.no_grad()`.": (
                self.latest.module is not None and not self.latest.with_gradients
            ),
        }
        return next((text for text, holds in reasons.items() if holds), None)

    def check_entry(self, name: str) -> None:
        """Raise if attention runs outside a forward pass of the model, and the provider must know when one begins."""
        if self.latest.whole or self.taps or torch.compiler.is_compiling() or in_backward():
            return
        if waits := self._drawing_in_prepare():
            raise RuntimeError(
                f"{type(waits[0]).__name__} draws its masks when a forward pass of the attached model begins, but "
                f"{name} runs outside such a pass. Call {type(self.model).__name__} itself, or attach to the module "
                "that you call."
            )

    def _drawing_in_prepare(self) -> list[Regularizer]:
        return [each for each in self.provider.parts() if each.draws_in_prepare]

    def __getstate__(self) -> dict[str, Any]:
        # A copy made within a `with` block or a pass would never leave it.
        return {
            **self.__dict__,
            "enabled": True,
            "probing": False,
            "taps": {},
            "tapped_inputs": {},
            "mode": None,
            "latest": Pass(),
            "_masked": Pass(),
            "own": None,
            "rows": None,
            "_to_repeat": [],
        }
