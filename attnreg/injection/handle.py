"""What :func:`attnreg.attach` leaves in a model and gives back to the caller."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from attnreg import functional
from attnreg.injection.attached_block import attached_blocks
from attnreg.injection.discovery import FoundSite
from attnreg.injection.module import AttachedModule
from attnreg.injection.shadow import Shadow
from attnreg.injection.tap import Tap
from attnreg.masks import AttentionSite, Mask, SiteInfo
from attnreg.provider import MaskProvider, may_skip_blocks


class AttachHandle:
    """A provider's connection to a model. Also a context manager that detaches at the end of its block.

    Everything it holds is copied and pickled with the model, so a copy of an attached model is attached to a copy of
    the provider. The provider is not a submodule of the model: its parameters stay out of ``model.parameters()``, and
    it is moved between devices on its own.
    """

    def __init__(self, model: nn.Module, provider: MaskProvider, found: Sequence[FoundSite], chosen: set[str]) -> None:
        self.provider = provider
        self.batch_size: int | None = None
        self.in_forward = False
        self.taps: dict[str, Tap] = {}
        self.input_names = list(inspect.signature(type(model).forward).parameters)[1:]
        self._enabled = True
        self._model = model
        self._sites = tuple(f.info for f in found if f.info.name in chosen)
        self.flat = {f.info.label for f in found if f.flat}
        self._rates: dict[str, Tensor] = {}
        calls: dict[nn.Module, list[SiteInfo | None]] = defaultdict(list)
        for site in found:
            calls[site.module].append(site.info if site.info.name in chosen else None)
        modules = {
            module: AttachedModule(self, module, infos)
            for module, infos in calls.items()
            if any(info for info in infos)
        }
        self._shadows: list[Shadow[Any]] = list(modules.values())
        if may_skip_blocks(provider):
            self._shadows += attached_blocks(self, found, chosen, modules)
        for attached in self._shadows:
            attached.install()
        self._hooks = [
            model.register_forward_pre_hook(functools.partial(_before_forward, self), with_kwargs=True),
            model.register_forward_hook(functools.partial(_after_forward, self), always_call=True),
        ]

    @property
    def sites(self) -> tuple[SiteInfo, ...]:
        """The attention sites that the provider is asked about, in the order in which they run."""
        return self._sites

    @property
    def attached(self) -> bool:
        """False once detached."""
        return bool(self._shadows)

    @property
    def active(self) -> bool:
        """Whether the provider may act, as far as the handle and the provider itself are concerned."""
        return self._enabled and self.provider.training and self.provider.active

    def step(self) -> None:
        """Tell the provider that an optimizer step is done."""
        self.provider.step()

    def drop_rates(self) -> dict[str, float]:
        """Share of dropped units per site in the latest forward pass in training mode, by ``"<stack>.<layer>"``.

        Counts valid positions of real query rows, never padding. Empty before the first such pass, and while the
        provider is not active.
        """
        return {label: float(rate) for label, rate in self.drop_rate_tensors().items()}

    def drop_rate_tensors(self, *, by_head: bool = False) -> dict[str, Tensor]:
        """The same as 0-d tensors, or ``(H,)`` where masks differ by head, without waiting for the device."""
        return dict(self._rates) if by_head else {label: rate.mean() for label, rate in self._rates.items()}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within the block the model is the plain model."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    @contextmanager
    def tapped(self, taps: Mapping[str, Tap]) -> Iterator[None]:
        """Within the block the model is the plain model, in either mode, and attention weights flow through taps.

        The tapped sites write their attention out, so that there are weights to flow.

        Args:
            taps: by the :attr:`SiteInfo.label` of their site.
        """
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoderLayer's, which computes no weights
        self.taps = dict(taps)
        try:
            with self.disabled():
                yield
        finally:
            self.taps = {}
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def detach(self) -> None:
        """Give the model back as it was. Twice is fine."""
        for attached in self._shadows:
            attached.remove()
        for hook in self._hooks:
            hook.remove()
        self._shadows, self._hooks = [], []

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
        """Remember the drop rate of a site."""
        kept = None if mask is None else mask.units_kept
        if kept is None:
            self._rates[site.label] = torch.zeros((), device=site.device)
        elif kept.dim() == 0:
            self._rates[site.label] = 1.0 - kept.float()
        else:
            by_head = kept.dim() == 4 and kept.shape[1] > 1
            self._rates[site.label] = functional.drop_rate(kept, site.units, by_head=by_head)

    def note_skipped(self, site: SiteInfo, skip: Tensor) -> None:
        """Remember that all of a site was dropped, with the block that holds it, where ``skip`` (0-d) is true."""
        rate = self._rates.get(site.label, torch.zeros((), device=skip.device))
        self._rates[site.label] = torch.where(skip, torch.ones_like(rate), rate)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """A forward pass of the model begins."""
        self.in_forward = True
        for attached in self._shadows:
            attached.begin()
        first = next((value for value in inputs.values() if isinstance(value, Tensor) and value.dim()), None)
        self.batch_size = None if first is None else first.shape[0]
        if self._model.training:
            self._rates = {}
            if self.active:
                self.provider.prepare(inputs)

    def end(self) -> None:
        """A forward pass of the model ends."""
        self.in_forward = False


# Hooks are partials of module-level functions: closures could be neither pickled nor copied.
def _before_forward(handle: AttachHandle, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if model is not handle._model:
        raise RuntimeError(
            "Expected one process per device (DistributedDataParallel, `accelerate launch`, `torchrun`), got "
            "nn.DataParallel, whose threads would share one provider."
        )
    handle.begin({**dict(zip(handle.input_names, args, strict=False)), **kwargs})


def _after_forward(handle: AttachHandle, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    handle.end()
