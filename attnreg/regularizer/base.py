"""The base class of all regularizers, and ``a & b``, which composes them."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg.draws import Draws
from attnreg.errors import InputError
from attnreg.masks import Mask
from attnreg.regularizer.saving import PretrainedMixin
from attnreg.sites import AttentionSite, HiddenSite, Site, SiteInfo

NEAR = 0.9  # of 1, as difflib measures likeness: one letter in ten


def _check_names(cls: type) -> None:
    """Raise if a class defines a public name that is nearly one of :class:`Regularizer`, which nobody would read."""
    known = {name: value for name, value in vars(Regularizer).items() if not name.startswith("_")}
    inherited = {name for parent in cls.__mro__[1:] for name in vars(parent)}
    for name, value in vars(cls).items():
        similar = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
        is_deliberate = name.startswith("_") or name in inherited or not similar
        if not is_deliberate and inspect.isfunction(value) == inspect.isfunction(known[similar[0]]):
            raise TypeError(
                f"{cls.__name__}.{name} would never be read. Did you mean {similar[0]}? If not, choose a name that is "
                "less like it, or begin it with an underscore."
            )


Penalty = Callable[[Any], Tensor | None]


def _recorded(penalty: Penalty) -> Penalty:
    """Record calls of a penalty, to warn of a penalty that nobody adds to the loss."""

    @functools.wraps(penalty)
    def wrapped(self: Regularizer) -> Tensor | None:
        if not torch.compiler.is_compiling():
            vars(self)["_penalty_was_read"] = True
        return penalty(self)

    return wrapped


class Regularizer(PretrainedMixin, nn.Module, ABC):
    """What all regularizers share: hooks around training steps, abilities, saving, and ``a & b``.

    To write one, derive from :class:`attnreg.MaskProvider` (attention) or :class:`attnreg.HiddenProvider` (hidden
    states). The hooks (:meth:`check`, :meth:`attribute`, :meth:`prepare`, :meth:`penalty`, :meth:`step`,
    :meth:`on_epoch`) have defaults, which pass the call on to regularizers held as submodules.

    A regularizer acts while both it and the attached module are in training mode. Draw with ``site.keep(p)`` and
    ``site.uniform()``: their numbers follow from the seed of the pass, so that gradient checkpointing and
    ``handle.replay()`` repeat them. Store every constructor argument as an attribute of the same name, so that
    :meth:`save_pretrained` can write it. Every built-in regularizer raises ``InputError``, a :class:`ValueError`, if an
    argument is out of range, and when attached to a model that lacks what it acts on, such as its layers or queries.
    Only arguments that a schedule can change may be set later.

    Abilities are class attributes, properties or methods that a subclass may override. A class whose body defines a
    name that is nearly one of them, or a hook, is refused with :class:`TypeError`: it would never be called.

    ======================  ============================  ==========================================================
    ability                 default                       what it tells
    ======================  ============================  ==========================================================
    ``schedulable``         ``()``                        the arguments that :class:`attnreg.Scheduled` can change
    ``skips_block(...)``    ``None``                      whether to skip the block around a self-attention
    ``looks_at_batches``    ``attribute`` is overridden   whether every training step needs ``attribute`` first
    ``looks_alone``         ``False``                     whether no other in a composition may look at batches
    ``uses_model_loss``     ``False``                     whether it computes the model's loss in extra passes
    ``draws_in_prepare``    ``prepare`` is overridden     whether the masks of a whole pass are drawn in ``prepare``
    ``decides_for_batch``   ``False``                     whether one decision holds for all rows of a batch
    ``effect``              ``"drops"``                   what it does, such as ``"adds noise"`` if it never drops
    ``first_epoch``         ``0``                         the first epoch in which it acts
    ``why_asleep(...)``     ``None``                      what is missing, if it cannot act as it should
    ======================  ============================  ==========================================================

    Example:
        >>> from attnreg import MaskProvider
        >>> class Careless(MaskProvider):
        ...     looks_at_batch = True
        Traceback (most recent call last):
            ...
        TypeError: Careless.looks_at_batch would never be read. Did you mean looks_at_batches? ...
    """

    schedulable: ClassVar[Collection[str]] = ()  # float arguments that `forward` reads in every call
    looks_alone: bool = False
    uses_model_loss: bool = False
    decides_for_batch: bool = False
    effect: str = "drops"
    first_epoch: int = 0
    _arguments: ClassVar[frozenset[str]]  # of a built-in constructor
    _scheduled: frozenset[str] = frozenset()  # the arguments that follow a schedule
    _penalty_was_read: bool = False  # whether anybody has called `penalty`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_names(cls)
        if inspect.isfunction(penalty := vars(cls).get("penalty")) and penalty is not Regularizer.penalty:
            cls.penalty = _recorded(cls.penalty)  # type: ignore[method-assign]
        built_in = cls.__module__.startswith("attnreg.")  # users' classes may set their arguments at any time
        cls._arguments = frozenset(inspect.signature(cls.__init__).parameters) if built_in else frozenset()

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._scheduled:
            raise InputError(f"`{name}` of this {type(self).__name__} follows a schedule: make a new one.")
        if name in self._arguments and (name in vars(self) or name in vars(self).get("_modules", ())):
            if name not in self.schedulable:
                raise InputError(f"`{name}` of {type(self).__name__} cannot be changed: make a new one.")
            self._check_value(name, value)
        super().__setattr__(name, value)

    def _check_value(self, name: str, value: Any) -> None:
        """Raise the constructor's error for this value of an argument, if any; random states stay as they are."""
        with torch.random.fork_rng(devices=[]):
            type(self)(**{**self.config, name: value})

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Act at one site; see :meth:`attnreg.MaskProvider.forward` and :meth:`attnreg.HiddenProvider.forward`."""

    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        """Raise ``InputError`` if this cannot act at these sites of a model; :func:`attnreg.attach` calls it first."""
        for part in self.inner():
            part.check(sites, model)

    @property
    def active(self) -> bool:
        """Whether the regularizer acts now; otherwise the attached model runs as the plain model."""
        return True

    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Look at a batch, with ``labels``, before the training step on it, as the first of two passes.

        The model's mode, parameters, ``grad`` and hooks, and the random state stay as they are.

        Raises:
            RuntimeError: if the regularizer is not attached to the model, directly or within a wrapper.
            InputError: if the model's output lacks what is needed, such as a loss.
        """
        for part in self._acting():
            part.attribute(model, batch)

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Prepare for a forward pass in training mode; called once before the pass, with the model's inputs by name."""
        for part in self._acting():
            part.prepare(inputs)

    @_recorded
    def penalty(self) -> Tensor | None:
        """Return a 0-d term to add to the training loss after a forward pass; ``None`` adds nothing.

        Parameters learn through it, too: ``optimizer.add_param_group({"params": provider.learned_parameters()})``.
        """
        return _combined(operator.add, [part.penalty() for part in self._acting()]) if self.active else None

    def learned_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the model's loss trains: by default, all that require a gradient."""
        inner = {id(parameter) for part in self.inner() for parameter in part.parameters()}
        direct = [p for p in self.parameters() if p.requires_grad and id(p) not in inner]
        return direct + [parameter for part in self.inner() for parameter in part.learned_parameters()]

    def step(self) -> None:
        """Advance schedules; called after every optimizer step."""
        for part in self.inner():
            part.step()

    def on_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0; called at its start."""
        for part in self.inner():
            part.on_epoch(epoch)

    def skips_block(self, site: SiteInfo, draws: Draws) -> Tensor | None:
        """Return whether to skip the block around a self-attention, 0-d, bool, on the CPU; ``None`` leaves it open."""
        return None

    @property
    def looks_at_batches(self) -> bool:
        """Whether :meth:`attribute` must be called before every training step: by default, if it is overridden."""
        return type(self).attribute is not Regularizer.attribute

    @property
    def draws_in_prepare(self) -> bool:
        """Whether :meth:`prepare` draws the masks of a pass, until the next one: by default, if it is overridden."""
        return type(self).prepare is not Regularizer.prepare

    def why_asleep(self, passes: int) -> str | None:
        """Return what is missing after so many training passes, and how to fix it; ``None`` if nothing is missing."""
        return None

    def inner(self, site: Site | None = None) -> list[Regularizer]:
        """Return the regularizers directly inside this one, or in its lists; with a site, the ones that act there."""
        lists = (child if isinstance(child, nn.ModuleList) else (child,) for child in self.children())
        return [module for modules in lists for module in modules if isinstance(module, Regularizer)]

    def parts(self) -> list[Regularizer]:
        """Return this regularizer and all inside it, from the outside in."""
        return [module for module in self.modules() if isinstance(module, Regularizer)]

    def mask_at(self, site: AttentionSite) -> Mask | None:
        """Return the mask of the regularizers inside this one at a site; ``None`` keeps everything."""
        mask = None
        for part in self.inner(site):  # not `_acting`, which costs two calls in every layer
            if part.training and part.active and (answer := part.mask_at(site)) is not None:
                mask = answer if mask is None else mask & answer
        return mask

    def states_at(self, site: HiddenSite, states: Tensor) -> Tensor:
        """Return hidden states as the regularizers inside this one change them, one after the other."""
        for part in self._acting(site):
            states = part.states_at(site, states)
        return states

    def skip_at(self, site: SiteInfo, draws: Draws) -> Tensor | None:
        """Return whether to skip the block around a self-attention: 0-d, bool; ``None`` if nothing here decides."""
        skip = self.skips_block(site, draws)
        if skip is not None and (skip.dim() or skip.dtype != torch.bool):
            raise InputError(
                f"Expected `skips_block` of {type(self).__name__} to return a 0-d bool tensor, got {skip.dtype} of "
                f"shape {tuple(skip.shape)} at {site.name}."
            )
        return _combined(operator.or_, [*(part.skip_at(site, draws) for part in self._acting(site)), skip])

    @property
    def may_skip_blocks(self) -> bool:
        """Whether this regularizer, or one inside it, skips blocks."""
        return any(type(part).skips_block is not Regularizer.skips_block for part in self.parts())

    def _acting(self, site: Site | None = None) -> list[Regularizer]:
        return [part for part in self.inner(site) if part.training and part.active]

    def __and__(self, other: Regularizer) -> Compose:
        """Apply both regularizers."""
        return Compose(self, other)

    def __rand__(self, other: Any) -> Compose:
        """Refuse ``DropHead & DropKey(0.1)``, as the reverse is refused."""
        return Compose(other, self)

    def __add__(self, other: Any) -> Any:
        """Refuse ``a + b``."""
        raise InputError("Regularizers are not added: compose them with `a & b`.")

    __radd__ = __add__

    def __bool__(self) -> bool:
        """Refuse ``a and b``, which would be ``b`` alone."""
        raise InputError(
            "A regularizer is neither true nor false: compose with `a & b` instead of `a and b`, and ask whether there "
            "is one with `is not None`."
        )

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Refuse to be a callback; the Trainer of transformers calls this first."""
        raise InputError(
            f"{type(self).__name__} is a regularizer, not a callback: pass `callbacks=[AttnRegCallback(...)]` of "
            "attnreg.integrations with it, or RegularizedTrainer(..., provider=...)."
        )


def _combined(combine: Callable[[Any, Any], Any], answers: Sequence[Any]) -> Any:
    answers = [answer for answer in answers if answer is not None]
    return functools.reduce(combine, answers) if answers else None


class Container(Regularizer):
    """A regularizer that acts only through its inner ones, which may be of attention and of hidden states."""

    def forward(self, site: Any, states: Tensor | None = None) -> Any:
        """Return the mask at an attention site, or the changed states at a hidden-state site, of the inner ones."""
        if not (self.training and self._is_on):
            return states
        return super().mask_at(site) if states is None else super().states_at(site, states)

    _is_on: bool = True  # whether the inner regularizers may act now

    @property
    @override
    def active(self) -> bool:
        return self._is_on and any(part.active for part in self.inner())

    @override
    def mask_at(self, site: AttentionSite) -> Mask | None:
        mask = self(site) if self._forward_hooks or self._forward_pre_hooks else self.forward(site)
        return mask if mask is None or type(mask) is Mask else a_mask(mask, self, site)

    @override
    def states_at(self, site: HiddenSite, states: Tensor) -> Tensor:
        changed = states_or_none(self(site, states), self, site, states)
        return states if changed is None else changed.to(states.dtype)


class Compose(Container):
    """Several regularizers at once, written ``a & b``. What any of them drops is dropped; factors multiply.

    Args:
        providers: the regularizers, which act in this order.

    Raises:
        InputError: if an argument is no regularizer, or a regularizer that steps or has a penalty occurs twice.

    Example:
        >>> from attnreg import AttentionDropout, AttentionLayerDrop
        >>> len((AttentionDropout(0.1) & AttentionLayerDrop(0.2) & AttentionDropout(0.3)).providers)
        3
    """

    def __init__(self, *providers: Regularizer) -> None:
        super().__init__()
        self.providers: nn.ModuleList = nn.ModuleList(
            part
            for provider in providers
            for part in (
                provider.providers
                if isinstance(provider, Compose) and provider._is_flat
                else (a_regularizer(provider, "Compose"),)
            )
        )
        parts = [part for provider in self.inner() for part in provider.parts()]
        for part in (part for number, part in enumerate(parts) if any(part is p for p in parts[:number])):
            for hook, does in (("step", "would step"), ("penalty", "may add its penalty")):
                if getattr(type(part), hook) is not getattr(Regularizer, hook):
                    name = type(part).__name__
                    raise InputError(f"One {name} is in the composition twice, and {does} twice: make two.")

    @override
    def inner(self, site: Site | None = None) -> list[Regularizer]:
        return [*self._modules["providers"]._modules.values()]  # type: ignore[union-attr]

    @property
    def _is_flat(self) -> bool:
        """Whether it is nothing but its parts: without hooks, and without another ``forward``."""
        overridden = type(self).forward is not Container.forward or "forward" in vars(self)
        return not (overridden or self._forward_hooks or self._forward_pre_hooks)


def a_regularizer(value: Any, where: str) -> Regularizer:
    """Return ``value`` if it is a regularizer; otherwise raise."""
    if not isinstance(value, Regularizer):
        raise InputError(f"Expected a regularizer in {where}, got {described(value)}.")
    if "_modules" not in vars(value):
        raise InputError(f"Call `super().__init__()` first in {type(value).__name__}.__init__.")
    return value


def a_mask(answer: Any, regularizer: Regularizer, site: AttentionSite) -> Mask | None:
    """Return a regularizer's answer at an attention site, or raise if it is neither a mask nor ``None``."""
    if answer is not None and not isinstance(answer, Mask):
        raise InputError(
            f"Expected {type(regularizer).__name__} to return a Mask or None, got {type(answer).__name__}, at "
            f"{site.name}: return `Mask(scores=...)` for what to keep before the softmax, or `Mask(weights=...)` for "
            "factors after it."
        )
    return answer


def states_or_none(answer: Any, regularizer: Regularizer, site: HiddenSite, states: Tensor) -> Tensor | None:
    """Return a regularizer's answer at a hidden-state site, or raise if it is neither ``None`` nor changed states."""
    if answer is None or (isinstance(answer, Tensor) and answer.shape == states.shape):
        return answer
    actual = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    raise InputError(
        f"Expected {type(regularizer).__name__} to return None or the changed states, of shape {tuple(states.shape)}, "
        f"got {actual}, at {site.name}."
    )


def described(value: Any) -> str:
    """Describe a value that is no regularizer, with the fix if it is nearly one."""
    if inspect.isclass(value) and issubclass(value, Regularizer):
        return f"the class {value.__name__}: make one, as in {value.__name__}()"
    if isinstance(value, str):
        return f"the text {value!r}: make a regularizer of it with `attnreg.parse_provider`"
    if isinstance(value, (list, tuple)) and any(isinstance(item, Regularizer) for item in value):
        return f"a {type(value).__name__}: compose regularizers with `a & b`"
    return f"{type(value).__name__}, which is no regularizer" if isinstance(value, nn.Module) else repr(value)
