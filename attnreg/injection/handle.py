"""The handle that :func:`attnreg.attach` returns."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from attnreg.draws import Draws, draws_from
from attnreg.injection.backends import Tap
from attnreg.injection.backends.layout import Layout
from attnreg.injection.discovery import Discovery, FoundSite, LeftOut
from attnreg.injection.discovery.coverage import why_hidden
from attnreg.injection.discovery.hidden import FoundHidden
from attnreg.injection.report import report
from attnreg.injection.running.attached_block import AttachedClassifier, attached_blocks
from attnreg.injection.running.attention_mode import AttachedModule, Planned
from attnreg.injection.running.padding import Padding, Paddings, takes_two
from attnreg.injection.running.rates import DropRates, in_backward
from attnreg.injection.running.seeds import Place, Seeds
from attnreg.injection.running.shadow import AttachedEntry, Shadow, entries
from attnreg.injection.running.watch import Watch
from attnreg.masks import Mask
from attnreg.regularizer.base import Regularizer
from attnreg.sites import AttentionSite, Site


class AttachHandle:
    """The connection between a provider and a model. As a context manager, it detaches at the end of the block.

    The provider is copied and pickled with the model: a copy of an attached model is attached to a copy of the
    provider. But the provider is not a submodule of the model: its parameters are not in ``model.parameters()``, and
    you move it between devices yourself.
    """

    def __init__(
        self,
        model: nn.Module,
        provider: Regularizer,
        found: Discovery,
        chosen: Set[str],
        states: Sequence[FoundHidden] = (),
    ) -> None:
        self.provider = provider
        self.in_forward = False
        self._padding: Padding | None = None  # of the pass that is running
        self._paddings = Paddings()
        self.mode: object = None  # the mode of the innermost attention module that is running
        self.taps: dict[str, Tap] = {}
        self.why_hidden = why_hidden(model)
        self.rates = DropRates()
        self._enabled = True
        self._probing = False
        self._seeds = Seeds()
        self._begun_by: nn.Module | None = None  # the module at which the latest forward pass began
        self._trains = False  # whether the current pass has gradients
        self._has_trained = False  # whether any pass so far had gradients
        self._model = model
        sites = [site for site in found.sites if site.info.name in chosen]
        everywhere: list[FoundSite | FoundHidden] = [*sites, *states]
        self._sites: tuple[Site, ...] = tuple(each.info for each in everywhere)
        self._modules = {each.info.name: each.module for each in everywhere}
        self._left_out = found.left_out_besides(chosen) if chosen else ()
        names = found.names
        modules = {
            module: AttachedModule(self, module, plans, names.get(module, type(module).__name__))
            for module, plans in _plans(found, chosen).items()
        }
        self._shadows: list[Shadow[Any]] = list(modules.values())
        self._shadows += attached_blocks(self, found, chosen, states, modules)
        last = [each for each in states if each.info.where == "pooled"]
        self._shadows += [AttachedClassifier(self, each.module, [each.info], each.info.name) for each in last]
        around = [[call.module for call in site.sighting.running if not call.is_repeated] for site in sites]
        around += [list(each.around) for each in states if each not in last or len(last) == len(self._sites)]
        begins = [AttachedEntry(self, module, names[module]) for module in reversed(entries(model, around))]
        self._shadows += begins
        # A wrapper that takes `**inputs` does not tell what the model in it takes.
        self._has_two = any(takes_two(each.input_names) for each in begins)
        for attached in self._shadows:
            attached.install()
        self._watch = Watch(provider)
        self._hooks = [model.register_forward_pre_hook(functools.partial(_refuse_replicas, model))]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The attention sites that the provider masks, then the hidden-state sites, each in running order."""
        return self._sites

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The attention that is not masked, and what only looks like attention; each with the reason."""
        return self._left_out

    @property
    def attached(self) -> bool:
        """Whether the provider is still attached to the model."""
        return bool(self._shadows)

    def holds(self, model: nn.Module) -> bool:
        """Whether a model contains a module that this handle changed."""
        inside = set(model.modules())
        return any(shadow.module in inside for shadow in self._shadows)

    @property
    def active(self) -> bool:
        """Whether the handle is enabled and the provider is in training mode and active."""
        return self._enabled and self.provider.training and self.provider.active

    def acts_on(self, module: nn.Module) -> bool:
        """Whether the provider masks a module that runs now: it must be in training mode, in a pass with gradients."""
        if self._probing:
            return self.active
        return module.training and self.active and (self._trains if self.in_forward else torch.is_grad_enabled())

    def report(self) -> str:
        """Return a table of the sites: mean drop rate so far, the model's own dropout, and the module."""
        return report(self._sites, self._modules, self.rates.mean())

    def step(self) -> None:
        """Advance the provider's schedules; call it after each optimizer step."""
        self.provider.step()
        self._seeds.forget()
        self._paddings.forget()

    @property
    def seed(self) -> int | None:
        """The seed of the latest masked pass, from which all its masks follow; ``None`` before the first."""
        return None if self._seeds.latest is None else int(self._seeds.latest)

    def drop_rates(self) -> dict[str, float]:
        """Return the drop rate of each site in the latest training or probed pass, by its label ``"<stack>.<layer>"``.

        Only valid positions of real query rows count, never padding. Empty before the first training pass, and while
        the provider is not active.
        """
        return {label: float(rate) for label, rate in self.drop_rate_tensors().items()}

    def drop_rate_tensors(self, *, by_head: bool = False) -> dict[str, Tensor]:
        """Return the drop rates as 0-d tensors (``by_head``: ``(H,)`` if masks differ by head), without device sync."""
        return self.rates.latest(by_head=by_head)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the plain model within the block, also inside :meth:`probing`."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Apply masks in every forward pass within the block, also in eval mode and without gradients.

        This tells how far a score falls when positions are dropped at test time. The model's mode stays as it is, so
        its own dropout is off in eval mode. The provider is asked as it is: :class:`attnreg.CrossTuning` masks only if
        the present epoch is one of its own. A provider that looks at batches needs
        ``provider.attribute(model, batch)`` before each pass; without it, the pass is not masked.
        """
        before, self._probing = self._probing, True
        try:
            with _written_out():
                yield
        finally:
            self._probing = before

    @contextmanager
    def replay(self, seed: int | None = None) -> Iterator[None]:
        """Repeat the masks of an earlier pass in every forward pass within the block, as :meth:`probing` applies masks.

        Masks are a function of the seed, the provider's state, and the positions; those of
        :class:`attnreg.GNetProvider` also of the inputs. A provider that looked at the batch
        (:class:`attnreg.AttributionProvider`) repeats only the latest pass, and only before :meth:`step`.

        Args:
            seed: the :attr:`seed` of that pass (default: of the latest).

        Raises:
            RuntimeError: if there has been no masked pass, a provider no longer has what the masks were made of, or it
                draws from torch's own generator.

        Example:
            >>> import attnreg
            >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
            >>> handle, x = attnreg.attach(model, attnreg.DropKey(0.5)), torch.randn(4, 3, 8)
            >>> y = model(x)
            >>> with torch.no_grad(), handle.replay():
            ...     torch.equal(model(x), y)
            True
        """
        seed = self.seed if seed is None else seed
        if seed is None:
            raise RuntimeError("There has been no masked pass whose masks could be repeated.")
        with self.probing(), self._seeds.given(torch.tensor(seed)):
            yield

    @contextmanager
    def tapped(self, taps: Mapping[str, Tap]) -> Iterator[None]:
        """Run the plain model within the block, and pass the attention weights of the tapped sites through taps.

        The tapped sites compute their weights explicitly, without a fused kernel.

        Args:
            taps: the taps, by ``label`` of their site.
        """
        self.taps = dict(taps)
        try:
            with self.disabled(), _written_out():
                yield
        finally:
            self.taps = {}

    def detach(self) -> None:
        """Restore the model. A second call does nothing."""
        for attached in reversed(self._shadows):
            attached.remove()
        for hook in self._hooks:
            hook.remove()
        self._shadows, self._hooks = [], []

    def __getstate__(self) -> dict[str, Any]:
        # A copy made within a `with` block would never leave it.
        return {**self.__dict__, "_enabled": True, "_probing": False, "_padding": None, "taps": {}}

    def __enter__(self) -> AttachHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        lines = "".join(f"\n  {site.label}: {site.name}" for site in self.sites)
        return f"AttachHandle({self.provider}, {'attached' if self.attached else 'detached'}){lines}"

    def note(self, site: AttentionSite, mask: Mask | None) -> None:
        """Record the drop rate of a site."""
        self.rates.note(site, mask)

    def begin(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str]) -> None:
        """Begin a forward pass of the model, or of a module in it that contains all its attention."""
        self.in_forward = True
        self._begun_by = module
        self._padding = Padding(inputs, names, has_two=self._has_two)
        self._trains = torch.is_grad_enabled()
        self._has_trained |= self._trains
        for attached in self._shadows:
            attached.begin()
        training = module.training and self._trains
        if training or self._probing:
            self.rates.clear()
        if training and self._enabled:
            self._watch.training_pass()
        if self._acts():
            with draws_from(self._seeds.begin()), self.asking():
                if self.acts_on(module):
                    self.provider.prepare(inputs)

    def end(self) -> None:
        """End a forward pass of the model."""
        if self._acts():
            self._seeds.end()
        self.in_forward = False
        self._padding = None

    def _acts(self) -> bool:
        """Whether the provider masks any module."""
        return any(self.acts_on(module) for module in self._modules.values())

    def asking(self, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Check within the block, in which the provider is asked, that masks that are repeated can be."""
        return self._seeds.asking(self.provider, device)

    def draws_at(self, site: Site, place: Place) -> Draws:
        """Return the source of what is drawn now at a place."""
        has_gradients = self._trains if self.in_forward else torch.is_grad_enabled()
        waiting = self._drawing_in_prepare()
        return self._seeds.of(
            site,
            place,
            in_forward=self.in_forward,
            has_gradients=has_gradients,
            only_latest=type(waiting[0]).__name__ if waiting else None,
        )

    def padding_at(self, site: Site) -> Padding:
        """Return the padding masks of the pass that computes hidden states now."""
        if self._padding is None and in_backward():
            return self._paddings.again(site.label, site.name)
        padding = self._padding or Padding()
        if not in_backward() and (self._trains if self.in_forward else torch.is_grad_enabled()):
            self._paddings.note(site.label, padding)
        return padding

    def end_again(self, module: nn.Module) -> None:
        """End a forward pass within a backward pass."""
        if self._begun_by is module:
            self._padding = None
            if self._acts():
                self._seeds.end()

    def begin_again(self, inputs: Mapping[str, Any], module: nn.Module, names: Sequence[str]) -> None:
        """Begin a forward pass within a backward pass; raise if it would be masked, and the one it repeats was not."""
        if self._begun_by is module:
            self._padding = Padding(inputs, names, has_two=self._has_two)
            if self._acts():
                self._seeds.repeat()
        if self.acts_on(module) and not self._has_trained:
            raise RuntimeError(
                f"{type(self.provider).__name__} cannot mask a forward pass that repeats one without gradients, "
                "because that one was not masked. Do not use cached losses (GradCache), and use gradient checkpointing "
                "with `use_reentrant=False`."
            )

    def _drawing_in_prepare(self) -> list[Regularizer]:
        return [each for each in self.provider.parts() if each.draws_in_prepare]

    def check_entry(self, name: str) -> None:
        """Raise if attention runs outside a forward pass of the model, and the provider must know when one begins."""
        if self.in_forward or self.taps or torch.compiler.is_compiling() or in_backward():
            return
        if waiting := self._drawing_in_prepare():
            raise RuntimeError(
                f"{type(waiting[0]).__name__} draws its masks when a forward pass of the attached model begins, but "
                f"{name} runs outside such a pass. Call {type(self._model).__name__} itself, or attach to the module "
                "that you call."
            )


def _plans(found: Discovery, chosen: Set[str]) -> dict[nn.Module, list[tuple[Planned, ...] | None]]:
    """For each module that computes chosen attention, list the attention to expect in each of its calls."""
    sites = {part: site for site in found.sites if site.info.name in chosen for part in (site.sighting, *site.others)}
    again = {part for site in found.sites if site.parts != "blocks" for part in site.others}
    modules = {sighting.place.module for sighting in sites}
    plans: dict[nn.Module, dict[int, list[Planned]]] = {module: defaultdict(list) for module in modules}
    for sighting in found.sightings:
        if sighting in again:
            continue
        around = next((call for call in reversed(sighting.running) if call.module in modules), None)
        if around is not None:
            layout = Layout() if sighting.reading is None else sighting.reading.layout
            site = sites.get(sighting)
            what = (None, layout) if site is None else (site.info, layout, site.parts)
            plans[around.module][around.index].append(Planned(sighting.backend, sighting.rank, *what))
    return {
        module: [
            tuple(calls[index]) if any(planned.info for planned in calls.get(index, ())) else None
            for index in range(max(calls) + 1)
        ]
        for module, calls in plans.items()
    }


@contextmanager
def _written_out() -> Iterator[None]:
    """Switch off the fast path of ``nn.TransformerEncoderLayer``, which hides its attention, within the block."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


# Hooks are partials of module-level functions: closures could be neither pickled nor copied.
def _refuse_replicas(attached: nn.Module, model: nn.Module, args: tuple[Any, ...]) -> None:
    if model is not attached:
        raise RuntimeError(
            "nn.DataParallel is not supported because its threads would share one provider. Use one process per device "
            "(DistributedDataParallel, `accelerate launch`, `torchrun`)."
        )
