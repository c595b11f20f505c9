"""The model's own randomness, such as its dropout, drawn from the seed of the forward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import functional, kernels
from attnreg.draws import Drawn, generator_states
from attnreg.errors import InputError
from attnreg.functional.attention import per_head
from attnreg.functional.seeded import transformed
from attnreg.injection.backends import sdpa
from attnreg.injection.backends.allowed import Allowed
from attnreg.injection.backends.base import Watching
from attnreg.injection.backends.fused import Attention
from attnreg.injection.backends.layout import Layout
from attnreg.injection.backends.multihead import heads_of, undispatched
from attnreg.injection.running.forward_pass import Pass
from attnreg.injection.running.repetition import foreign_function
from attnreg.masks import Mask

WEIGHTS, STATES, NUMBERS = range(3)  # what is drawn: attention weights (and images), hidden states, or mere numbers
BITS = {torch.bfloat16: 8, torch.float16: 11}  # of numbers in [0, 1) that are never rounded to 1


class OwnDraws(Watching):
    """Draws every random number of the model from the seed of the pass, the running module, and the number of the draw.

    So numbers do not depend on other modules. While it is active, it is ``own_draws`` of the ``passes``.
    """

    def __init__(
        self, passes: Any, now: Pass, seed: int | Tensor, *, is_first: bool = False, checks: bool = True
    ) -> None:
        super().__init__()
        self.passes = passes
        self.seed = seed
        assert now.batch is not None
        self.batch = now.batch
        self.counts = now.own_counts
        self.running: list[Any] = []  # the modules that run, with their names and digests of these
        self.paused = False  # whether a regularizer draws now
        self._is_first = is_first  # whether no earlier pass of the model drew
        # the states of all generators, to check that nothing else draws; ``None`` without this check
        self._began = generator_states() if checks and not torch.compiler.is_compiling() else None

    def again(self, now: Pass) -> OwnDraws:
        """Return a mode that will draw the same numbers as this one from now on, in a pass that repeats its pass."""
        copied = OwnDraws(self.passes, now, self.seed, checks=False)
        copied.running = [*self.running]
        return copied

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw all numbers within the block."""
        outer, self.passes.own_draws = self.passes.own_draws, self
        try:
            with self:
                yield
        finally:
            self.passes.own_draws = outer

    def has_grad(self) -> bool:
        """Whether gradients are enabled, or were in the pass that is repeated now."""
        return bool(self.passes.has_grad())

    def check(self, name: str) -> None:
        """Raise if the generator of torch, numpy or Python has moved since the pass began: the pass cannot repeat."""
        if self._began is None or not (self._is_first or not self.running):
            return
        moved = [owner for owner, state in generator_states().items() if state != self._began[owner]]
        if moved:
            raise RuntimeError(
                f"{name} draws random numbers from {moved[0]} generator in its forward pass (or another thread does), "
                "which attnreg cannot draw from the seed of the pass: integers, dropout within a kernel (nn.LSTM, "
                "flash attention), or SpecAugment. Switch this off in the model's configuration, or attach without "
                'own_dropout="seeded".'
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draw = DRAWN.get(func)
        if draw is None:
            output = func(*args, **kwargs)
            if func is Tensor.reshape:
                sdpa.note_packed(args[0], output)
            if self.batch.rows is not None:
                _note_shared(output, args, kwargs)
            return output
        if self.paused:
            self._began = None  # a regularizer may move torch's generator
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise RuntimeError(
                f"{self.name} draws random numbers from a torch.Generator of its own, which does not follow the seed "
                'of the pass: attach without own_dropout="seeded".'
            )
        return draw(self, func, *args, **kwargs)

    @property
    def name(self) -> str:
        """The name of the module that is running."""
        return self.running[-1].name

    def next_seed(self, kind: int) -> int | Tensor:
        """Return another seed for every draw."""
        if not torch.compiler.is_compiling():
            self._check_repeatable()
        module = self.running[-1]
        count = self.counts.get((module.name, kind), 0)
        self.counts[module.name, kind] = count + 1
        return functional.fold_seed(functional.fold_seed(self.seed, module.digest + kind), count)

    def check_real(self, like: Tensor) -> None:
        """Refuse complex numbers."""
        if like.is_complex():
            raise InputError(f"{self.name} draws complex numbers, which attnreg cannot draw from the seed of the pass.")

    def numbers(
        self, like: Tensor, p: float | None = None, *, shape: Sequence[int] = (), kind: int = NUMBERS
    ) -> Tensor:
        """Draw numbers in ``[0, 1)``, or with p decisions that keep with probability 1 - p, for a tensor."""
        self.check_real(like)
        seed, dims, place = self.place(like, shape or like.shape, kind)
        if p is not None:
            keep = functional.seeded_keep(seed, dims, p, device=like.device, **place)
            return keep.view(like.shape if keep.numel() == like.numel() else tuple(shape))
        drawn = functional.seeded_uniform(seed, dims, device=like.device, **place).view(tuple(shape or like.shape))
        if like.dtype in BITS:
            drawn = drawn.mul_(2 ** BITS[like.dtype]).floor_().mul_(2 ** -BITS[like.dtype])
        return drawn

    def place(
        self, like: Tensor, shape: Sequence[int], kind: int
    ) -> tuple[int | Tensor, tuple[int, int, int, int], dict[str, Any]]:
        """Return the seed of the next draw for a tensor, its dimensions ``(B, H, Q, K)``, and their first indices."""
        seed = self.next_seed(kind)
        heads = self.heads if self.heads is not None else getattr(self.passes.mode, "heads", None)
        if kind == STATES and heads is not None and len(shape) == 3:
            shape = shape[0] // heads, heads, *shape[1:]
        parts = (part for module in self.running for part in module.name.split("."))
        encodes = self.batch.has_encoder and next((part for part in parts if part.endswith("coder")), "") == "encoder"
        batch = replace(self.batch, cached=0, rooms=()) if encodes else self.batch
        try:
            return seed, *batch.place(shape, like.device, shared=_is_shared(like))
        except InputError as error:
            raise InputError(f"A tensor of {self.name} {error}: replay the whole batch, without `rows`.") from None

    def drawn(self, like: Tensor, shape: Sequence[int], p: float) -> Drawn:
        """Return decisions about attention weights, drawn at their first use; kept weights are divided by 1 - p."""
        seed, dims, place = self.place(like, shape, WEIGHTS)
        return Drawn(seed, p, dims, like.device, rescale=True, **place)

    def _check_repeatable(self) -> None:
        """Make checkpoints that run now repeat their draws; raise if another function would not repeat them."""
        if transformed():
            raise RuntimeError(
                f'{self.name} draws under torch.func (vmap, grad), which own_dropout="seeded" does not support yet.'
            )
        self.passes.checkpoints()
        if function := foreign_function():
            raise RuntimeError(
                f"{self.name} draws within an autograd.Function ({function}), whose backward pass may draw other "
                "numbers: use torch.utils.checkpoint for gradient checkpointing."
            )


SHARED = "_attnreg_shared"  # marks tensors computed from parameters alone, which are the same for all samples


def _is_shared(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or hasattr(tensor, SHARED)


def _note_shared(output: Any, args: Any, kwargs: Any) -> None:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if tensors and isinstance(output, Tensor) and all(map(_is_shared, tensors)):
        setattr(output, SHARED, True)


def _dropout(
    draws: OwnDraws,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> Tensor:
    training = next((mode for mode in (training, train) if mode is not None), func is F.dropout)
    if not training or p == 0 or not 0 <= p <= 1 or not input.numel():
        return func(input, p, training, **({"inplace": inplace} if func.__module__ == F.__name__ else {}))
    shape = (*input.shape[:2], *[1] * (input.dim() - 2)) if func in FEATURES else tuple(input.shape)
    if func not in FEATURES and input.dim() < 4 and kernels.drops(input):
        seed, dims, place = draws.place(input, shape, STATES)
        out = kernels.dropout(input.reshape(dims), seed, p, **place).view(input.shape)
        return input.copy_(out) if inplace or func in IN_PLACE else out
    keep = draws.numbers(input, p, shape=shape, kind=WEIGHTS if input.dim() > 3 else STATES)
    out = input * (keep.to(input.dtype).div_(1 - p if p < 1 else 1))
    return input.copy_(out) if inplace or func in IN_PLACE else out


def _fused(
    draws: OwnDraws,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not dropout_p:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if hasattr(query, sdpa.PACKED):
        attend = functools.partial(_fused, draws, func)
        return sdpa.unpacked(attend, query, key, value, attn_mask, dropout_p, is_causal, scale)
    shape = sdpa.shape_of_scores(query, key)
    allowed = Allowed.of_sdpa(sdpa.materialized(attn_mask), is_causal, *shape[-2:])
    decisions = draws.drawn(query, shape, dropout_p)
    attention = Attention(query, key, value, allowed, allowed, Layout(), scale, 0.0, enable_gqa)
    mask = Mask(drawn_weights=(decisions,))
    options = attention.kernel_options(mask, draws) if query.dim() == key.dim() == 4 else None
    if options is not None:
        return kernels.attention(query, key, value, **options)
    if enable_gqa:
        key, value = (per_head(x, query.shape[-3]) for x in (key, value))
    bias = allowed.shut_bias(query.device)
    valid = allowed.valid(query.device) if bias is None else bias > -math.inf
    weights = functional.attention_weights(query, key, valid, bias, scale)
    return (weights * decisions.factors(weights.dtype).view(shape)) @ value


def _bernoulli(draws: OwnDraws, func: Any, input: Tensor, p: Any = None, **kwargs: Any) -> Tensor:
    if func is Tensor.bernoulli_:
        into, p = input, 0.5 if p is None else p
    else:
        into, p = torch.empty_like(input) if kwargs.get("out") is None else kwargs["out"], input if p is None else p
    return into.copy_(draws.numbers(into) < p)


def _uniform_(draws: OwnDraws, func: Any, input: Tensor, low: float = 0, high: float = 1, **kwargs: Any) -> Tensor:
    low, high = kwargs.get("from", low), kwargs.get("to", high)
    return input.copy_(draws.numbers(input) * (high - low) + low)


def _normal_(draws: OwnDraws, func: Any, input: Tensor, mean: float = 0, std: float = 1, **kwargs: Any) -> Tensor:
    return input.copy_(_normal(draws, input) * std + mean)


def _exponential_(draws: OwnDraws, func: Any, input: Tensor, lambd: float = 1.0, **kwargs: Any) -> Tensor:
    return input.copy_(torch.log1p(-draws.numbers(input.detach().float())) / -lambd)


def _normal(draws: OwnDraws, like: Tensor) -> Tensor:
    draws.check_real(like)
    return torch.erfinv(2 * (draws.numbers(like.detach().float()) + 2.0**-25) - 1) * 2**0.5


def _new(draws: OwnDraws, func: Any, *args: Any, generator: None = None, **kwargs: Any) -> Tensor:
    make = torch.empty_like if func in (torch.rand_like, torch.randn_like) else torch.empty
    out = make(*args, **kwargs)
    with torch.no_grad():
        return out.copy_(draws.numbers(out) if func in (torch.rand, torch.rand_like) else _normal(draws, out))


def _inside(draws: OwnDraws, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function of torch that is written in Python, and draw in it."""
    with draws.of_heads(heads_of(args, kwargs) if func is F.multi_head_attention_forward else draws.heads), draws:
        return INSIDE[func](*args, **kwargs)


FEATURES: set[Any] = {torch.feature_dropout, torch.feature_dropout_}
IN_PLACE: set[Any] = {torch.dropout_, torch.feature_dropout_}
INSIDE: dict[Any, Any] = {
    function: undispatched(function)
    for function in (F.dropout1d, F.dropout2d, F.dropout3d, F.gumbel_softmax, F.multi_head_attention_forward)
}
DRAWN: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout, *FEATURES, *IN_PLACE), _dropout),
    **dict.fromkeys(INSIDE, _inside),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_), _bernoulli),
    **dict.fromkeys((torch.rand, torch.rand_like, torch.randn, torch.randn_like), _new),
    F.scaled_dot_product_attention: _fused,
    Tensor.exponential_: _exponential_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
}
