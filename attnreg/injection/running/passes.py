"""The forward passes of an attached model, and the calls of the provider in them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from typing_extensions import override

from attnreg.draws import Draws, draws_from
from attnreg.errors import AsleepWarning
from attnreg.functional.seeded import INTERPRETERS, is_traced, transformed
from attnreg.injection.discovery.coverage import why_hidden
from attnreg.injection.running.changes import Changes
from attnreg.injection.running.forward_pass import (
    KINDS,
    NUMBER_OF_KINDS,
    PREPARATION,
    Pass,
    Place,
    numbered_seed,
    seed_of_pass,
    without_global_draws,
)
from attnreg.injection.running.own_draws import OwnDraws
from attnreg.injection.running.padding import Padding, check_windows
from attnreg.injection.running.repetition import Repeatable, foreign_function, in_hook
from attnreg.kernels.seeds import mix_64
from attnreg.regularizer.abilities import PATIENCE, Watch, that_look_at_batches
from attnreg.regularizer.base import Regularizer
from attnreg.sites import Site


class Passes(Repeatable):
    """State that the replaced forwards of an attached model share: the provider, and the forward pass that is running.

    The provider acts at ``modules``. ``padding`` makes the padding masks of a pass from its inputs and all input names.
    """

    def __init__(
        self, model: nn.Module, provider: Regularizer, modules: Sequence[nn.Module], padding: Callable[..., Padding]
    ) -> None:
        super().__init__()
        self.provider = provider
        self.tapped_inputs: dict[str, Tensor] = {}
        self.why_hidden = why_hidden(model)
        self.model = model
        self.seed: Tensor | None = None  # of the latest pass that drew
        self.attached = True
        self.changes = Changes(model, (), {})
        self.seeds_own = False  # whether the model's own randomness follows from the seed of a pass
        self.uncompiled = False  # whether `torch.compile` leaves the attached modules out of its graphs
        self.modules = tuple(modules)
        self._padding = padding
        self._prepared: Pass | None = None  # the latest pass for which the provider has prepared
        self._had_gradients = False  # whether the latest pass in training mode had gradients
        self._has_drawn = False  # whether the model's own randomness was drawn in any pass
        self._watch = Watch(provider)
        self._steps = 0
        self._steps_without_pass = 0  # optimizer steps since the latest training pass
        self._drawn_at_end: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether masks are enabled and the provider is in training mode and active."""
        return self.enabled and self.provider.training and self.provider.active

    def acts_on(self, module: nn.Module) -> bool:
        """Whether the provider masks a module that runs now: it must be in training mode, in a pass with gradients."""
        if self.probing:
            return self.active
        return module.training and self.active and self.latest.has_gradients

    def acts_at(self, name: str, module: nn.Module) -> bool:
        """Whether a call of a module is masked; raise if gradient checkpointing could not repeat its masks."""
        now = self.latest
        if self.quiet and now.is_running and not self.probing:
            if now.active is None:  # decided once per pass
                now.active = self.active
            return module.training and now.active and now.with_gradients
        acts = self.acts_on(module)
        if self.quiet or torch.compiler.is_compiling():
            return acts
        if acts and self.repeats is not None:
            if (early := self._drawing_in_prepare()) and self.latest.original is not self._prepared:
                raise RuntimeError(
                    f"{type(early[0]).__name__} draws its masks when a forward pass begins, and gradient checkpointing "
                    f"repeats {name} of an earlier pass: run the backward pass of each forward pass before the next."
                )
        elif acts and self.latest.with_gradients and (function := foreign_function()):
            raise RuntimeError(
                f"{name} runs in an autograd.Function ({function}), whose backward pass may compute it without its "
                "masks: use torch.utils.checkpoint for gradient checkpointing."
            )
        return acts

    def check_plain(self, name: str, module: nn.Module) -> None:
        """Raise if a module would be masked now, in the repetition of a call that nobody has seen."""
        if self.acts_on(module):
            raise RuntimeError(
                f"Gradient checkpointing repeats {name}, but it is not known whether it was masked: its forward pass "
                "was before `attach`, or in a checkpoint of another library. Attach first, and use "
                "`torch.utils.checkpoint`."
            )

    @override
    def settings(self) -> tuple[Any, ...]:
        settings = (
            (name, value)
            for part in self.provider.parts()
            for name, value in vars(part).items()
            if name == "training" or (name[0] != "_" and isinstance(value, (bool, int, float, str)))
        )
        return self._steps, self.provider.active, *settings, *(module.training for module in self.modules)

    def begin(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str], *, whole: bool = True) -> None:
        """Begin a forward pass of the model, or of a module in it, which may not contain the ``whole`` attention."""
        original = None if self.repeats is None else next(self.repeats.begun, None)
        now = self.latest = Pass(module, whole, not whole, original=original)
        self._run(now, inputs, names)
        now.with_gradients = torch.is_grad_enabled()
        if (lists := inputs.get("output_attentions")) is None:
            lists = getattr(getattr(module, "config", None), "output_attentions", False)
        now.lists_attention = bool(lists)
        if self.replayed_seed is not None and not torch.compiler.is_compiling():
            check_windows(inputs)
        self._check_repetition(now, module)
        now.with_gradients = self.has_grad()
        for checkpoint in self.checkpoints():
            checkpoint.begun.append(original or now)
        for calls in self._calls:
            calls.done = 0
        now.acts = self._acts()
        if original is not None:
            if original.drew_in_prepare:
                self.seed_of(now)  # moves the generator as in the original pass
            return
        self._note_training(now, module)
        if self.taps and not self.tapped_inputs:
            self.tapped_inputs = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if now.acts:
            self._prepare(now, inputs)

    def _run(self, now: Pass, inputs: Mapping[str, Any], names: Sequence[str]) -> None:
        """Give a pass that begins, or goes on, the inputs of the module that is called."""
        now.is_running, now.active, now.padding = True, None, self._padding(inputs, names)
        if self.seeds_own or self.rows is not None:
            now.batch = now.padding.batch(inputs, self.rows)

    def _check_repetition(self, now: Pass, module: nn.Module) -> None:
        """Raise if a pass would be masked that repeats an unmasked pass, or a pass that nobody has seen."""
        original = now.original
        was_plain = in_hook() and not self._had_gradients if original is None else not original.with_gradients
        if was_plain and self._acts():
            raise RuntimeError(
                f"{type(self.provider).__name__} cannot mask a forward pass that repeats one without gradients, "
                "because that one was not masked. Do not use cached losses (GradCache), and use gradient checkpointing "
                "with `use_reentrant=False`."
            )
        if self.repeats is not None and original is None:
            self.check_plain(type(module).__name__, module)

    def _note_training(self, now: Pass, module: nn.Module) -> None:
        """Note for later passes, rates and warnings a pass that repeats no other."""
        trains = module.training or (now.acts and not self.probing)  # parts may be in training mode alone
        if trains and not in_hook():
            self._had_gradients = now.with_gradients
        training = trains and now.with_gradients
        if training or self.probing:
            self.rates.clear()
        if training and self.enabled:
            self._watch.training_pass()
            if any(masked.training for masked in self.modules):  # not only other parts of the model
                self._steps_without_pass = 0

    def _prepare(self, now: Pass, inputs: Mapping[str, Any]) -> None:
        """Check that the model has not changed, and let the provider prepare."""
        if not torch.compiler.is_compiling():
            self.changes.check_modules()
        self._check_trace()
        self._prepared = now
        draws = Draws(functools.partial(self._seed_of_preparation, now), replayed=self.replayed_seed is not None)
        with draws_from(draws), self.asking():
            if now.whole or not self._drawing_in_prepare():
                self.provider.prepare(inputs)

    def _check_trace(self) -> None:
        """Raise if the pass is recorded, and all runs of the record would have the same masks."""
        if torch.compiler.is_exporting() and (parts := that_look_at_batches(self.provider)):
            raise RuntimeError(
                f"{type(parts[0]).__name__} makes its masks for one batch, so torch.export cannot export them. "
                "Export in eval mode, or within `handle.disabled()`."
            )
        if torch.compiler.is_compiling():
            return
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        records = torch._C._get_tracing_state() is not None or get_proxy_mode() is not None
        if captures or records or is_fx_symbolic_tracing():
            raise RuntimeError(
                "torch.jit.trace, torch.fx and CUDA graphs would repeat the masks of this forward pass in every call. "
                "Record the model in eval mode, within `handle.disabled()`, or with `torch.export` or `torch.compile`."
            )

    def go_on(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str], *, begins: bool) -> None:
        """Go on with a pass that consists of parts of the model, or begin another (if this part has already run)."""
        now = self.latest
        if begins or not now.is_open or now.with_gradients != self.has_grad():
            self.begin(inputs, module, names, whole=False)
        else:
            if self._acts() and not torch.compiler.is_compiling():
                self.changes.check_modules()
            self._run(now, inputs, names)

    def forget_calls(self) -> None:
        """Count the calls of modules anew, before a call of the model that may begin no pass."""
        self.latest.is_open = False
        for calls in self._calls:
            calls.done = 0

    def end(self, *, completed: bool = False) -> None:
        """End the forward pass, or the present part of a pass that may go on in another part of the model."""
        now = self.latest
        moves = now.seed is not None and (now.original is None or now.generator_hash == now.original.generator_hash)
        if moves and now.whole and self._acts() and (torch.compiler.is_compiling() or not transformed()):
            # This moves the generator before later draws. Without the attribute, compiled code would leave it out.
            self._drawn_at_end = seed_of_pass()
        now.is_running, now.padding, now.allowed = False, None, {}
        now.is_open &= completed
        if torch.compiler.is_exporting():  # no pass has run: its seed and rates have no values
            self.latest, self.seed = Pass(), None
            self.rates.forget()
        elif completed and not torch.compiler.is_compiling() and self.repeats is None:
            self._check_ran()

    def _check_ran(self) -> None:
        """Check once after a whole pass, or in :meth:`step` if it was compiled, that all masked modules have run."""
        now = self.latest
        if now.whole and now.acts and not now.is_checked:
            now.is_checked = True
            self.changes.check_ran(self.acts_on)

    def _acts(self) -> bool:
        """Whether the provider masks any module."""
        return any(self.acts_on(module) for module in self.modules)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw the model's own randomness within the block from the seed of the pass."""
        now = self.latest
        seed = self.seed_of(now)
        draws = OwnDraws(self, now, seed if is_traced() else int(seed), is_first=not self._has_drawn)
        self._has_drawn = True
        with draws.active():
            yield

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Call the provider within the block: if its masks are replayed, check that they can be."""
        draws, checks = self.own_draws, self.replayed_seed is not None and not torch.compiler.is_compiling()
        if draws is not None:
            draws.paused = True
        try:
            with without_global_draws(self.provider) if checks else nullcontext():
                yield
        finally:
            if draws is not None:
                draws.paused = False

    def seed_of(self, now: Pass) -> Tensor:
        """Return the seed of a pass, which is drawn at its first use."""
        if now.seed is None:
            now.generator_hash = 0 if is_traced() else hash(torch.get_rng_state().numpy().tobytes())
            if (original := now.original) is None:
                now.seed = self.seed = seed_of_pass(self.replayed_seed)
            else:
                now.seed = original.seed
                if now.generator_hash == original.generator_hash:  # checkpointing has set the generator back
                    seed_of_pass()  # moves it as in the original pass
        assert now.seed is not None
        return now.seed

    def _seed_of_preparation(self, now: Pass) -> int | Tensor:
        now.drew_in_prepare = True
        return numbered_seed(self.seed_of(now), PREPARATION)

    def draws_at(self, site: Site, place: Place) -> Draws:
        """Return the source of the next numbers that a site draws at a place."""
        now = self.latest
        # Without seeded dropout, positions count from the first one, also if it is padding; only `rows` matter then.
        batch = now.batch if self.seeds_own or now.batch is None else replace(now.batch, first=None, cached=0)
        seed = functools.partial(self._next_seed, now, place, site)
        return Draws(seed, batch=batch, traced=False if self.quiet else None)

    def _next_seed(self, now: Pass, place: Place, site: Site) -> int | Tensor:
        kind = KINDS[place, site.stack]
        count = now.counts[kind, site.layer]
        now.counts[kind, site.layer] = count + 1
        number = ((count * NUMBER_OF_KINDS + kind) << 32) + site.layer
        if not self.quiet or INTERPRETERS() is not None:  # within the regularizer, too
            return numbered_seed(self.seed_of(now), number)
        if now.mixed is None:
            now.mixed = mix_64(int(self.seed_of(now)))
        return mix_64(now.mixed + number)  # as `fold_seed` does

    def step(self) -> None:
        """Advance the provider's schedules, and end the pass that could go on."""
        if self._acts():
            self.changes.check_modules()
            self._check_ran()
        self.provider.step()
        self.rates.count()
        self._steps += 1
        self.latest.is_open = False
        self._steps_without_pass += 1
        if self._steps_without_pass == PATIENCE and self.enabled:
            why = self.why_plain() or (
                "Attach to the model that you train (an earlier copy is not attached), and call it or its parts."
            )
            text = f"{type(self.model).__name__} had no training pass in {PATIENCE} optimizer steps. {why}"
            warnings.warn(text, AsleepWarning, stacklevel=3)

    def why_plain(self) -> str | None:
        """Return why a pass would not be masked now, or the latest pass was not, and the fix; ``None`` if unknown."""
        asleep = [type(part).__name__ for part in self.provider.parts() if not part.active]
        reasons = {
            "The regularizer is detached.": not self.attached,
            "Masks are off within `handle.disabled()`.": not self.enabled,
            "The regularizer is in eval mode: call `provider.train()`.": not self.provider.training,
            f"{', '.join(asleep)} does not act in this epoch: see `provider.on_epoch`.": bool(self.modules)
            and not self.provider.active,
            "The model is in eval mode: call `model.train()`.": not any(module.training for module in self.modules),
            "The latest forward pass had no gradients: call the model outside `torch.no_grad()`.": (
                self.latest.module is not None and not self.latest.with_gradients
            ),
        }
        return next((text for text, holds in reasons.items() if holds), None)

    def check_entry(self, name: str) -> None:
        """Raise if attention runs outside a forward pass of the model, and the provider must know when one begins."""
        if self.latest.whole or self.taps or torch.compiler.is_compiling():
            return
        if early := self._drawing_in_prepare():
            raise RuntimeError(
                f"{type(early[0]).__name__} draws its masks when a forward pass of the attached model begins, but "
                f"{name} runs outside such a pass. Call {type(self.model).__name__} itself, or attach to the module "
                "that you call."
            )

    def _drawing_in_prepare(self) -> list[Regularizer]:
        return [part for part in self.provider.parts() if part.draws_in_prepare]

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "tapped_inputs": {}, "_prepared": None}
