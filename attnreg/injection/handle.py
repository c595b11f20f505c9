"""The handle that :func:`attnreg.attach` returns."""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnreg.arguments import short
from attnreg.errors import InputError
from attnreg.injection.backends import Tap
from attnreg.injection.discovery import Discovery, LeftOut, ModelSite
from attnreg.injection.discovery.blocks import input_names
from attnreg.injection.discovery.hidden import HiddenModelSite
from attnreg.injection.discovery.snapshot import evaluated
from attnreg.injection.report import DroppedTokens, Rates, Report, dropped_tokens, names_of
from attnreg.injection.running.attached_block import attached_blocks
from attnreg.injection.running.attached_module import attached_modules
from attnreg.injection.running.changes import Changes, is_installed
from attnreg.injection.running.padding import DECODES, Padding, conventions_of, hides_padding
from attnreg.injection.running.passes import Passes
from attnreg.injection.running.replaced_forward import (
    MARK,
    AttachedEntry,
    Mark,
    ReplacedForward,
    connect,
    entries,
    parts_of,
    seeded_modules,
)
from attnreg.regularizer.abilities import effects
from attnreg.regularizer.base import Regularizer
from attnreg.sites import Site


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
        chosen: Sequence[ModelSite],
        states: Sequence[HiddenModelSite] = (),
        *,
        seeded: bool = False,
    ) -> None:
        sites: list[ModelSite | HiddenModelSite] = [*chosen, *states]
        #: the attention sites that the provider masks, then the hidden-state sites, both in running order
        self.sites: tuple[Site, ...] = tuple(site.info for site in sites)
        #: attention that is not masked, and computations that only look like attention, with the reasons
        self.left_out: tuple[LeftOut, ...] = found.left_out_besides(chosen) if chosen else ()
        calls = [site.attention.running for site in chosen]
        around = [[call.module for call in running if not call.is_repeated] for running in calls]
        # Beside other sites, a classifier does not count: it is outside the encoder, whose call alone is a whole pass.
        around += [list(state.around) for state in states if state.info.where != "pooled" or len(sites) == 1]
        begins = entries(model, around)
        parts = parts_of(begins, [*([call.module for call in running] for running in calls), *around[len(calls) :]])
        # A wrapper that takes `**inputs` does not show the input names of the model in it.
        has_two = any(DECODES & {*input_names(module)} for module in begins)
        conventions = conventions_of(model, found.sites)
        hides = hides_padding(found.sites, conventions)
        padding = functools.partial(Padding, has_two=has_two, conventions=conventions, hides=hides)
        passes = self._passes = Passes(model, provider, [site.module for site in sites], padding)
        #: whether the model's own randomness follows from the seed of the pass (``own_dropout="seeded"``)
        self.seeds_own = passes.seeds_own = seeded
        passes.uncompiled = seeded and has_two
        self.rates = passes.rates
        modules = attached_modules(passes, found, chosen)
        self._replaced: list[ReplacedForward[Any]] = [
            *modules.values(),
            *attached_blocks(passes, found, chosen, states, modules),
            *(reversed(seeded_modules(passes, found.names)) if seeded else ()),
            *(AttachedEntry(passes, module, found.names[module], whole=False) for module in reversed(parts)),
            *(AttachedEntry(passes, module, found.names[module], whole=True) for module in reversed(begins)),
        ]
        connect(self._replaced[: -len(begins)])
        for attached in self._replaced:
            attached.install(self)
        masked = [replaced for replaced in self._replaced if not isinstance(replaced, AttachedEntry)]
        passes.changes = Changes(model, masked, found.names)
        self._hook = model.register_forward_pre_hook(functools.partial(_before_call, model))
        self._check: RemovableHandle | None = None  # a hook that checks what has run, for one call of the model

    @property
    def provider(self) -> Regularizer:
        """The regularizer that decides on masks; attach another one to replace it."""
        return self._passes.provider

    @property
    def attached(self) -> bool:
        """Whether the provider is still attached to the model."""
        return bool(self._replaced)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            advice = f": call `handle.provider.{name}`" if hasattr(Regularizer, name) else ""
            advice = ": pass `callbacks=[AttnRegCallback(handle)]`" if name == "on_init_end" else advice
            raise AttributeError(f"AttachHandle has no attribute {name!r}{advice}.")

    def holds(self, model: nn.Module) -> bool:
        """Whether a model contains a module that this handle changed."""
        inside = set(model.modules())
        return any(replaced.module in inside for replaced in self._replaced)

    @property
    def active(self) -> bool:
        """Whether the provider is attached, enabled, in training mode and active."""
        return self.attached and self._passes.active

    @property
    def own_draws(self) -> dict[str, int]:
        """How often every module drew from the seed of the latest pass; empty without ``own_dropout="seeded"``."""
        counts: Counter[str] = Counter()
        for (name, _), count in self._passes.latest.own_counts.items():
            counts[name] += count
        return dict(counts)

    def report(self) -> Report:
        """Return a table of the sites: mean drop rate so far, and the module; below, why nothing may be dropped."""
        rates, why = self.rates.mean(), self._passes.why_plain()
        notes = [why] if why is not None and not (rates and self.attached) else []
        notes += ["Drop rates are not measured within torch.func."] if self.rates.are_hidden and not rates else []
        shown = {label: f"{rate:.3f}" for label, rate in rates.items()}
        rows = [(site.label, shown.get(site.label, "none yet"), site.name) for site in self.sites]
        return Report.of_rows([("site", "drop rate", "module"), *rows], [*effects(self.provider), *notes])

    def show(
        self, batch: Mapping[str, Tensor], tokenizer: Any = None, *, row: int = 0, seed: int | None = None
    ) -> DroppedTokens:
        """Show the tokens of a sample and the share of every token that is dropped; a notebook shades the tokens.

        A token counts as a key of attention, over heads, queries and layers, or as a hidden state.

        Args:
            batch: the inputs of the model, with ``input_ids``, and ``labels`` if the provider needs them.
            tokenizer: names the tokens (default: their numbers).
            row: the sample in the batch.
            seed: chooses the masks (default: the seed of the latest pass with this provider, or 0).

        Raises:
            InputError: if the provider does not act on these tokens, or the batch has no ``input_ids`` or is padded at
                the left.
        """
        model, tokens = self._passes.model, names_of(batch, row, tokenizer)
        chosen = next(number for number in (seed, self.seed, 0) if number is not None)

        def run() -> None:
            self.provider.attribute(model, batch)
            with torch.no_grad(), self.replay(chosen):
                model(**batch)

        rates = dict(vars(self.rates))
        try:
            with evaluated(model):
                return dropped_tokens(run, self.provider, tokens, row, chosen)
        finally:  # as before the pass
            vars(self.rates).update(rates)

    def step(self) -> None:
        """Advance the provider's schedules; call it after every optimizer step."""
        self._passes.step()

    @property
    def seed(self) -> int | None:
        """The seed of the latest masked pass, from which all its masks follow; ``None`` before the first."""
        seed = self._passes.seed
        return None if seed is None else int(seed)

    def drop_rates(self) -> dict[str, float]:
        """Return the drop rates of sites in the latest training or probed pass, by label ``"<stack>.<layer>"``.

        Only valid positions of real query rows count, never padding. Empty before the first training pass, and while
        the provider is not active.
        """
        return Rates({label: float(rate) for label, rate in self.drop_rate_tensors().items()})

    def drop_rate_tensors(self) -> dict[str, Tensor]:
        """Return the drop rates as 0-d tensors, without device sync."""
        return dict(self.rates.latest)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the plain model within the block, also inside :meth:`probing`."""
        with self._passes.having(enabled=False):
            yield

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Apply masks in every forward pass within the block, also in eval mode and without gradients.

        This tells how far a score falls when positions are dropped at test time. The model's mode stays as it is, so
        its dropout is off in eval mode. So does the provider: :class:`attnreg.CrossTuning` masks only if it does so in
        the present epoch. A provider that looks at batches needs ``provider.attribute(model, batch)`` before every
        pass; without this call, the pass is not masked.
        """
        with self._passes.having(probing=True), _written_out():
            yield

    @contextmanager
    def replay(self, seed: int | None = None, rows: Sequence[int] | Tensor | None = None) -> Iterator[None]:
        """Repeat the masks of an earlier pass in every forward pass within the block, as :meth:`probing` applies masks.

        Masks are a function of the seed, the provider's state, and the positions; masks of
        :class:`attnreg.GNetProvider` also of the inputs. A provider that looked at the batch
        (:class:`attnreg.AttributionProvider`) repeats only the latest pass, and only before :meth:`step`.

        Args:
            seed: the :attr:`seed` of that pass (default: of the latest), or any integer.
            rows: int64, the index of each sample in the batch of that pass (default: all samples, in order); for parts
                of this batch in other passes or processes. Samples with one index share their masks.

        Raises:
            InputError: if the seed is no integer, ``rows`` has no index for each sample, a regularizer decides
                before the pass, or samples are not told apart.
            RuntimeError: if there has been no masked pass, a provider no longer has the data of the masks, or it
                draws from a global generator.

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
        if isinstance(seed, float):
            raise InputError(f"Expected an integer as seed, got {seed}.")
        if seed is None:
            raise RuntimeError("No pass has drawn masks that could be repeated: make one first, or give a `seed`.")
        indices = None if rows is None else torch.as_tensor(rows)
        if indices is not None and (indices.dtype != torch.int64 or indices.dim() != 1 or indices.lt(0).any()):
            raise InputError(f"Expected `rows` to be indices (int64, from 0), got {short(rows)}.")
        parts = self.provider.parts()
        early = [type(part).__name__ for part in parts if part.draws_in_prepare or part.looks_at_batches]
        if rows is not None and early:
            raise InputError(
                f"{early[0]} decides for a whole batch before the pass, so masks of single samples cannot be repeated: "
                "replay the whole batch, or use another regularizer."
            )
        with self.probing(), self._passes.having(rows=indices, replayed_seed=torch.tensor(seed)):
            yield

    @contextmanager
    def tapped(self, taps: Mapping[str, Tap]) -> Iterator[None]:
        """Run the plain model within the block, and pass the attention weights of sites through taps, by label.

        The tapped sites compute their weights explicitly, without a fused kernel.
        """
        with self._passes.having(taps=dict(taps), enabled=False), _written_out():
            yield

    def inputs_of_tapped_pass(self) -> dict[str, Tensor]:
        """Return the inputs of the first pass in a :meth:`tapped` block since the latest call of this method.

        They are the inputs of the attached model, also if it was called through a wrapper that changes them.
        """
        inputs, self._passes.tapped_inputs = self._passes.tapped_inputs, {}
        return inputs

    def detach(self) -> None:
        """Restore the model. A second call does nothing.

        Raises:
            RuntimeError: if gradient checkpointing would then repeat a masked forward pass without its masks.
        """
        if self.attached and self._passes.waits():
            raise RuntimeError(
                "A forward pass with gradient checkpointing waits for its backward pass, which repeats its masks. Run "
                "the backward pass, or delete the loss, before `detach`."
            )
        self._remove()

    def _remove(self) -> None:
        for attached in reversed(self._replaced):
            attached.remove()
        for hook in (self._hook, self._check):
            if hook is not None:
                hook.remove()
        self._replaced = []
        self._passes.attached = False

    def __deepcopy__(self, memo: dict[int, Any]) -> AttachHandle:
        if id(self._passes.model) not in memo:
            copy.deepcopy(self._passes.model, memo)
            if id(self) in memo:
                return memo[id(self)]
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for replaced, replaced_copy in zip(self._replaced, copied._replaced, strict=True):
            if replaced_copy.installed is None:  # its module was copied before the model, as a part
                replaced_copy.__dict__.update(copy.deepcopy(replaced.__dict__, memo))
                setattr(replaced_copy.module, MARK, Mark(copied, copied._passes.model))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        states = [(replaced, vars(replaced), vars(replaced.module)[MARK]) for replaced in self._replaced]
        return {**self.__dict__, "_replaced": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _replaced=[replaced for replaced, _, _ in state["_replaced"]])
        for replaced, attributes, mark in state["_replaced"]:
            replaced.__dict__.update(attributes)
            mark.handle, mark.model = self, replaced.passes.model

    def __enter__(self) -> AttachHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.detach()
        else:
            self._remove()

    def __repr__(self) -> str:
        lines = "".join(f"\n  {site.label}: {site.name}" for site in self.sites)
        return f"AttachHandle({self.provider}, {'attached' if self.attached else 'detached'}){lines}"


class _FastPath:
    """Torch's switch for the fast path of ``nn.TransformerEncoderLayer``; ``with`` blocks of all threads share it."""

    lock = threading.Lock()
    holders = 0
    was_enabled = True


@contextmanager
def _written_out() -> Iterator[None]:
    """Switch off the fast path of ``nn.TransformerEncoderLayer``, which hides its attention, within the block."""
    with _FastPath.lock:
        if not _FastPath.holders:
            _FastPath.was_enabled = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _FastPath.holders += 1
    try:
        yield
    finally:
        with _FastPath.lock:
            _FastPath.holders -= 1
            if not _FastPath.holders:  # blocks may end in any order
                torch.backends.mha.set_fastpath_enabled(_FastPath.was_enabled)


# Hooks are partials of module-level functions, because closures can be neither pickled nor copied.
def _before_call(attached: nn.Module, model: nn.Module, args: tuple[Any, ...]) -> None:
    if model is not attached:
        raise RuntimeError(
            "This is a shallow copy of the attached model, as nn.DataParallel makes them; it would share the provider. "
            "Use `copy.deepcopy`, or one process per device (DistributedDataParallel, `accelerate launch`, `torchrun`)."
        )
    handle: AttachHandle = vars(model)[MARK].handle
    passes = handle._passes
    if torch.compiler.is_compiling() or passes.latest.is_running or is_installed(handle._replaced[-1]):
        return
    # No pass may begin, and so none is checked: accelerate restores all forwards at once when it removes its hooks.
    passes.forget_calls()
    handle._check = handle._check or model.register_forward_hook(_after_call)


def _after_call(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    handle: AttachHandle = vars(model)[MARK].handle
    if handle._check is not None:
        handle._check.remove()
        handle._check = None
    handle._passes.changes.check_forwards(handle._passes.acts_on)
