"""The mode that masks the attention of an attached module by the plan that the dry run gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from attnreg.draws import Drawn, Draws, new_seed
from attnreg.errors import InputError, NoAttentionError
from attnreg.functional.seeded import INTERPRETERS, fold_seed, is_traced
from attnreg.injection.backends import BY_FUNCTION, Asked
from attnreg.injection.backends.allowed import Allowed, LazySite
from attnreg.injection.backends.base import Masking, Parts
from attnreg.injection.backends.layout import STANDARD, Layout
from attnreg.injection.backends.sdpa import note_packed
from attnreg.injection.running.passes import Passes
from attnreg.injection.running.repetition import TOP_HOOKS, checkpoint_around, foreign_function
from attnreg.injection.running.soft_masks import ADDS_OR_MULTIPLIES, SoftMasks
from attnreg.masks import TENSORS, Mask
from attnreg.sites import AttentionSite, SiteInfo

RESHAPE, UNFLATTEN = Tensor.reshape, Tensor.unflatten


@dataclass(frozen=True)
class Planned:
    """One computation that looked like attention when the model was attached, in one call of a module."""

    backend: str  # name of the backend that saw it
    rank: int  # number of dimensions of its scores
    info: SiteInfo | None  # its site; ``None`` if it is not attention, or not chosen
    layout: Layout  # layout of its scores
    # how it is split, if it is computed in several parts. Parts of ``"values"`` share one mask, parts of ``"rows"`` get
    # one mask each (their number may vary), and parts of ``"blocks"`` are planned separately
    parts: Parts | None

    def __post_init__(self) -> None:
        if self.info is not None:  # created once, for calls with scores of this layout
            later = Asked(self.info, self.layout, True, self.parts)
            vars(self).update(first_part=replace(later, again=False), later_part=later)

    def fits(self, backend: str, rank: int) -> bool:
        """Whether a call may be this computation; a transformers model may switch to softmax, to return its weights."""
        return self.rank == rank and (self.backend == backend or self.layout.dims == STANDARD)

    first_part: Asked = field(init=False, repr=False, compare=False)  # the whole attention, or the first part of it
    later_part: Asked = field(init=False, repr=False, compare=False)  # a later part, with other values


class AttentionMode(Masking):
    """Applies the provider's masks to the attention of one module call, which must be as planned.

    Torch switches a mode off while it handles a function, so providers and backends can call torch as usual.
    """

    def __init__(self, passes: Passes, plan: Sequence[Planned], name: str) -> None:
        self.passes = passes
        self.name = name
        self._plan = plan
        self.index = 0  # of the next computation in the plan
        self.seen: set[int] = set()  # indices of the chosen computations that have run
        self._latest: Mask | None = None
        self._site: AttentionSite | None = None  # of the latest mask, unless an earlier part had this mask, too
        self._soft_masks: SoftMasks | None = None
        self._checkpoint = None if passes.quiet else checkpoint_around()
        self._had_gradients = passes.quiet or torch.is_grad_enabled()
        self._draws: dict[str, tuple[Draws, int, int]] = {}  # by site, with the number of parts and of queries so far

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        passes = self.passes
        if func in BY_FUNCTION and passes.mode is self:
            passes.quiet = self.is_quiet = passes.quiet and INTERPRETERS() is None  # within the module, too
            first = args[0] if args else next(iter(kwargs.values()))
            if first.is_nested:
                raise NoAttentionError(
                    f"{self.name} got nested tensors, which cannot be masked: pad its inputs instead."
                )
            if type(first).__name__ == "DTensor":
                raise NoAttentionError(
                    f"{self.name} computes its attention on several processes (context, sequence or tensor "
                    "parallelism), each of which would begin its masks at position 0. Use data parallelism (DDP, FSDP)."
                )
            return BY_FUNCTION[func].intercept(self, func, *args, **kwargs)
        if func in ADDS_OR_MULTIPLIES and passes.mode is self:
            self._soft_masks = self._soft_masks or SoftMasks()
            self._soft_masks.note(func, args, kwargs)
        if func is UNFLATTEN and torch.compiler.is_compiling():
            func = torch.unflatten  # torch.compile cannot trace the method under a mode
        out = func(*args, **kwargs)
        if func is RESHAPE and args[0].ndim == out.ndim == 4 and args[0].shape[2] == 1:
            note_packed(args[0], out)
        return out

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward under this mode."""
        with self:
            return forward(*args, **kwargs)

    def lacks_alike(self) -> bool:
        """Whether a computation has not run that is not chosen, and that a masked one may have been instead."""
        missing = [planned for planned in self._plan[self.index :] if planned.info is None]
        masked = [self._plan[index] for index in self.seen]
        return any(planned.fits(other.backend, other.rank) for planned in missing for other in masked)

    @override
    def expect(self, backend: str, shape: tuple[int, ...]) -> Asked | None:
        rank, heads, index = len(shape), self.heads, self.index
        for planned in self._plan[index:]:
            if heads is not None or planned.fits(backend, rank):
                break
            index += 1
        else:
            if any(planned.info is not None and planned.fits(backend, rank) for planned in self._plan):
                raise NoAttentionError(
                    f"{self.name} computes more attention in this forward pass than when it was attached "
                    f"(computations then: {len(self.seen)}). Attach with `example_inputs` like these inputs; if it "
                    "computes more only in training mode, leave it out with `modules=...`."
                )
            return None
        self.index = index if planned.parts in ("rows", "values") else index + 1
        if planned.info is None:
            return None
        is_later = planned.parts == "values" and index in self.seen
        self.seen.add(index)
        if self.passes.taps:
            self.tap = self.passes.taps.get(planned.info.label)
            if self.tap is None:
                return None
            self.taps_output = self.tap.at_output and planned.parts is None
        layout = planned.layout
        if heads is None and layout.is_plain and planned.info.heads in (None, shape[1]):
            return planned.later_part if is_later else planned.first_part
        if heads is not None:  # scores have four dimensions if the weights are returned, else three
            layout = replace(layout, dims="fqk" if rank == 3 else STANDARD, heads=heads if rank == 3 else 1)
        layout = layout.of_pass(shape)
        self._check_heads(planned.info, layout, shape, heads)
        return Asked(planned.info, layout, is_later, planned.parts)

    @override
    def read(self, mask: Tensor | None, is_causal: bool, queries: int, keys: int, device: torch.device) -> Allowed:
        if not self.passes.quiet or (mask is not None and mask.is_inference()):
            return Allowed.of_sdpa(mask, is_causal, queries, keys)
        known = self.passes.latest.allowed
        key = id(mask), 0 if mask is None else mask._version, is_causal, queries, keys, device
        if key not in known:
            known[key] = Allowed.of_sdpa(mask, is_causal, queries, keys)
        return known[key]

    @override
    def has_grad(self) -> bool:
        return self.passes.has_grad()

    @override
    def allowed(self, scores: Tensor) -> Tensor:
        return (self._soft_masks or SoftMasks()).allowed(scores)

    def _check_heads(self, info: SiteInfo, layout: Layout, shape: tuple[int, ...], heads: int | None) -> None:
        if heads is None:
            heads = layout.heads
            for size, letter in zip(shape, layout.dims, strict=True):  # torch.compile knows no generator in `math.prod`
                heads *= size if letter == "h" else 1
        if info.heads is not None and heads != info.heads:
            raise NoAttentionError(
                f"{info.name} has {heads} heads in this forward pass, but had {info.heads} when it was attached, so it "
                "would get the masks of other heads. Tensor parallelism is not supported; if heads were removed, call "
                "`handle.detach()`, then `attach` again."
            )

    @override
    def ask(self, site: Asked, shape: tuple[int, ...], allowed: Allowed, *, like: Tensor, **fields: Any) -> Mask | None:
        self._site = None
        if self.tap is not None:
            return None
        if site.again:
            return self._latest
        passes, queries = self.passes, None
        if site.info.stack == "cross":
            padding = passes.latest.padding
            if padding is not None and padding.has_two:  # without two stacks, queries may be latent vectors
                queries, _ = padding.tokens("decoder", (shape[0], shape[2], 0))
                queries = None if queries is None else queries.to(like.device)
        draws = passes.draws_at(site.info, "attention") if site.parts is None else self._draws_of(site, shape[2])
        fields |= {"shape": shape, "queries": queries, "draws": draws, "device": like.device, "dtype": like.dtype}
        # A compiler leaves out fields that nobody reads, and cannot trace the cached properties of a lazy site.
        if not passes.quiet and torch.compiler.is_compiling():
            attention: AttentionSite = AttentionSite(**fields | vars(site.info), valid=allowed.valid(like.device))
        else:
            attention = LazySite.of(site.info, allowed, fields)
        if site.parts is None and site.info.stack == "decoder" and shape[2] != shape[3]:
            draws.first_query = _first_query(attention)
        if passes.own_draws is None and passes.replayed_seed is None:
            mask = passes.provider.mask_at(attention)
        else:
            with passes.asking():
                mask = passes.provider.mask_at(attention)
        if mask is not None:
            if not (passes.quiet and torch.is_grad_enabled() and TOP_HOOKS(True) is None):
                self._check_backward()
            mask = _checked(mask, attention, type(passes.provider).__name__)
        self._latest, self._site = mask, attention
        return mask

    @override
    def note(self, mask: Mask | None) -> None:
        if self._site is not None:
            self.passes.rates.note_mask(self._site, mask, quiet=self.passes.quiet)

    @override
    def count(self, kept: Tensor | None, factor: Tensor | None = None) -> None:
        if self._site is not None:
            self.passes.rates.note(self._site, kept, factor, quiet=self.passes.quiet)

    @override
    def counter(self, factor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        passes = self.passes
        if self._site is None or passes.repeats is not None:
            return None, None
        return passes.rates.counter(self._site, factor, len(passes.modules))

    @override
    def own_dropout(self, query: Tensor, shape: tuple[int, ...], p: float) -> Drawn:
        draws = self.passes.own_draws
        if draws is not None:
            return draws.drawn(query, shape, p)
        return Drawn(_dropout_seed(query.device), p, shape, query.device, rescale=True)  # type: ignore[arg-type]

    def _check_backward(self) -> None:
        """Raise if the backward pass would repeat the attention, or compute its gradient, without its masks."""
        if torch.compiler.is_compiling():
            return
        if checkpoint_around() is not self._checkpoint:
            raise NoAttentionError(
                f"{self.name} runs gradient checkpointing inside its own forward, which would repeat its attention "
                "without masks. Checkpoint the block around it instead, or the module after `attach`."
            )
        function = foreign_function(AttentionMode.run.__code__) if self._had_gradients else None
        if function is not None:
            raise NoAttentionError(
                f"{self.name} computes its attention in an autograd.Function ({function}), whose own backward pass "
                "does not know the masks. Compute it with torch's operations, or leave the module out with "
                "`modules=...`."
            )

    def _draws_of(self, site: Asked, queries: int) -> Draws:
        """Return the source of draws for a part. All parts have one seed, and queries are counted from part to part."""
        name = site.info.name
        first, part, query = self._draws.get(name) or (self.passes.draws_at(site.info, "attention"), 0, 0)
        self._draws[name] = first, part + 1, query + queries
        if not part:
            return first
        return first.at(part=part) if site.parts == "rows" else first.at(first_query=query)

    @override
    def finish(self, layout: Layout, weights: Tensor, mask: Mask | None, valid: Tensor | None) -> Tensor:
        on_keys = layout.of_keys(weights)
        if mask is not None and mask.has_factors:
            mass = on_keys.sum(-1, keepdim=True) if layout.has_sinks and mask.normalized is not None else None
            on_keys = mask.of_weights(on_keys, valid)
            on_keys = on_keys if mass is None else on_keys * mass  # the mass that is not on sinks
        if self.tap is not None:
            on_keys = self.tap(on_keys)
        return layout.with_keys(weights, on_keys)


def _dropout_seed(device: torch.device) -> int | Tensor:
    """Return the seed of the model's own dropout, and advance the generator that torch's kernel would draw from."""
    if torch.compiler.is_compiling() or device.type != "cuda":
        seed = new_seed()
        return seed if torch.compiler.is_compiling() else int(seed)
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return fold_seed(generator.initial_seed(), offset)


def _first_query(site: AttentionSite) -> int:
    """Return the position of the first query among the keys of causal attention: after the keys of a cache."""
    queries, keys = site.shape[2:]
    if queries == keys:
        return 0
    for query in range(0 if is_traced() else queries):
        if (valid := site.valid_of(torch.tensor([query], device=site.device))) is None:
            break
        seen = valid.expand(*valid.shape[:-1], keys).flatten(0, -2).any(0).nonzero()
        if len(seen):  # else every row begins with padding
            return int(seen[-1]) - query  # the last key is at the position of the query
    return keys - queries


def _checked(mask: Mask, site: AttentionSite, provider: str) -> Mask | None:
    """Return the mask of a provider on the device of its site, or raise if it has another shape."""
    mask = mask if site.in_kernel else mask.written_out(site.dtype)
    moved: dict[str, Any] = {}
    fields = mask.__dict__
    for name in TENSORS:
        tensor = fields[name]
        if tensor is None:
            continue
        rank = tensor.ndim
        if name == "scores" and not rank and not torch.compiler.is_compiling() and bool(tensor):
            moved["scores"] = None  # the whole layer is kept
            continue
        fits = rank <= 4
        for size, needed in zip(reversed(tensor.shape), reversed(site.shape), strict=False):
            fits = fits and size in (1, needed)
        if not fits:
            raise InputError(
                f"Expected the {name} mask of {provider} to be broadcastable to (B, H, Q, K) = {tuple(site.shape)}, "
                f"got {tuple(tensor.shape)}, at {site.name}."
            )
        if tensor.device != site.device and not mask.drops_layer:
            moved[name] = tensor.to(site.device)
    mask = replace(mask, **moved) if moved else mask
    return None if mask.is_empty else mask
