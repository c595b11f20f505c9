"""Attention through ``flex_attention``, torch's kernel for scores that a function modifies."""

from __future__ import annotations

import functools
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.overrides import handle_torch_function, has_torch_function

from attnreg import functional
from attnreg.errors import AttnRegWarning, NoAttentionError, one_line
from attnreg.functional.attention import ScoreMod, per_head
from attnreg.functional.validity import FORBIDDEN_BELOW, allowed
from attnreg.injection.backends.allowed import Allowed, FindValid
from attnreg.injection.backends.base import BY_FUNCTION, Backend, Call, Masking, Noting
from attnreg.masks import Mask

# The kernel's backward pass computes weights from the log-sum-exp: in float32, those of a fully dropped row are off by
# 1e-4 with this score, and by more with a lower score. Scores that the model forbids must stay below it.
DROPPED = -1e4
FURTHER = -1e6
LARGE = 2**26  # positions of an attention from which a warning says that weights are written out
OLDEST_TORCH = "2.11"  # before it, vmap cannot index a tensor by the head, query or key
TRANSFORMERS = "transformers.integrations.flex_attention", "compile_friendly_flex_attention"


class FlexAttention(Backend):
    """``flex_attention``, called directly or by transformers (``attn_implementation="flex_attention"``).

    Torch does not dispatch it to torch function modes: a mode would be compiled into it. So while an attached attention
    module runs, all names in Python modules for it, or for ``torch.compile(flex_attention)``, are bound to a wrapper
    that does dispatch.
    """

    name = "flex"
    functions = (flex_attention,)

    def __init__(self) -> None:
        super().__init__()
        self._bindings: list[tuple[dict[str, Any], str, Any]] = []
        self._size = (0, 0)
        self._no_lse: set[str] = set()  # devices whose kernel returns no log-sum-exp
        self._has_warned = False

    def read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreMod | None = None,
        block_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Call:
        """Read a call, which is always attention."""
        if torch.__version__ < OLDEST_TORCH:  # it compares versions, not letters
            raise NoAttentionError(
                f"flex_attention needs torch {OLDEST_TORCH} or newer, got {torch.__version__}. Update torch, or load "
                "the model with attn_implementation='sdpa'."
            )
        shape = (*query.shape[:-1], key.shape[-2])
        return Call(shape, query=query, key=key, valid=_valid(score_mod, block_mask, shape, query))

    def discover(self, finder: Noting, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the call and return zeros, because compiling a kernel for the dry run would take seconds."""
        return finder.note(self.name, self.read(*args, **kwargs), _zeros, *args, **kwargs)

    def intercept(
        self,
        mode: Masking,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreMod | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        **options: Any,
    ) -> Any:
        """Run the kernel with a score function that drops scores, or explicit attention if weights are needed."""
        shape = (*query.shape[:-1], key.shape[-2])
        site = mode.expect(self.name, shape)
        options = {"return_lse": return_lse, "kernel_options": kernel_options, **options}
        run = functools.partial(func, query, key, value, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)
        if site is None:
            return run(score_mod=score_mod, **options)
        if mode.tap is not None and mode.taps_output:
            out = None
            with suppress(NotImplementedError), torch.compiler.set_stance("default"):  # the kernel may be compiled
                out = run(score_mod=score_mod, **options)  # gradients on a CPU are not implemented
            if out is not None:
                values = site.layout.of_keys(value, dim=-2)
                if isinstance(out, tuple):
                    return mode.tap.output(out[0], values), *out[1:]
                return mode.tap.output(out, values)
        find_valid = functools.partial(_valid, score_mod, block_mask, shape, query)
        fields: Any = {"query": query, "key": key, "scale": scale, "score_mod": score_mod, "in_kernel": True}
        mask, factor = mode.ask(site, shape, Allowed(find=find_valid), like=query, **fields), None
        mode.note(mask)
        if mask is not None and mode.tap is None:
            mask, factor = mask.factored()
            mask = None if mask.is_empty else mask
        in_kernel = mask is not None and mask.drawn_weights and mask.drops_in_kernel and mode.tap is None
        if mask is not None and in_kernel and query.device.type not in self._no_lse:
            try:
                return _scaled(factor, _in_two_passes(run, score_mod, mask, find_valid, shape, options))
            except RuntimeError as error:  # on a CPU, compiled kernels return no log-sum-exp; Inductor wraps the error
                if not (isinstance(error, NotImplementedError) or "`return_lse` is not supported" in str(error)):
                    raise
                self._no_lse.add(query.device.type)  # else it would be compiled, and fail, in all passes
        if mode.tap is not None or (mask is not None and mask.has_factors):
            self._warn_of_memory(site.info.name, shape)
            mask = None if mask is None else mask.written_out(torch.promote_types(query.dtype, torch.float32))
            valid = find_valid(None)
            scores = _scores(query, key, scale, score_mod, block_mask)
            if mask is not None and mask.scores is not None:
                scores = functional.masked_scores(scores, mask.scores, valid)
            empty = (scores == -torch.inf).all(-1, keepdim=True)  # rows whose output is 0, as in the kernel
            weights = mode.finish(site.layout, scores.masked_fill(empty, 0.0).softmax(-1), mask, valid)
            weights = weights.masked_fill(empty, 0.0).to(value.dtype)
            return _scaled(factor, _returned(weights @ per_head(value, query.shape[1]), scores, options))
        if mask is not None:
            score_mod = _masked(score_mod, mask, find_valid, shape)
        try:
            return _scaled(factor, run(score_mod=score_mod, **options))
        except NotImplementedError as error:
            raise NoAttentionError(
                f"flex_attention cannot train {site.info.name} here ({one_line(error)}). Use another "
                "device, or attn_implementation='sdpa'."
            ) from error

    def _warn_of_memory(self, name: str, shape: tuple[int, ...]) -> None:
        """Warn once of attention that is so large that nobody would compute it without the kernel."""
        if math.prod(shape) >= LARGE and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"flex_attention cannot apply this mask to {name}, or show its weights: they are written out, in "
                f"memory for {tuple(shape)} numbers. Use a regularizer that drops scores, keys or heads.",
                AttnRegWarning,
                stacklevel=2,
            )

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Make calls of ``flex_attention`` reach the active torch function mode within the block."""
        size = len(sys.modules), len(vars(sys.modules["__main__"]))  # names in a notebook come and go
        if size != self._size:
            self._size = size
            self._bindings = list(self._find_bindings())
        current = [binding for binding in self._bindings if binding[0].get(binding[1]) is binding[2]]
        for namespace, name, function in current:
            namespace[name] = functools.partial(_dispatched, function)
        try:
            yield
        finally:
            for namespace, name, function in current:
                namespace[name] = function

    def _find_bindings(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield all bindings of the function, compiled or not: namespace, name, function."""
        in_transformers = getattr(sys.modules.get(TRANSFORMERS[0]), TRANSFORMERS[1], None)
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if type(value) is FunctionType and (
                    value is in_transformers or vars(value).get("_torchdynamo_orig_callable", value) is flex_attention
                ):
                    BY_FUNCTION[value] = self
                    yield module.__dict__, name, value


def _scaled(factor: Tensor | None, out: Any) -> Any:
    """Multiply an output, or the first of several outputs, by a factor."""
    if factor is None:
        return out
    if isinstance(out, tuple):
        return _scaled(factor, out[0]), *out[1:]
    return out * factor.to(out.dtype)


def _of_block_mask(block_mask: Any, shape: tuple[int, ...], like: Tensor, rows: Tensor | None = None) -> Tensor | None:
    if block_mask is None:
        return None
    batch, heads = block_mask.kv_num_blocks.shape[:2]  # 1 if the model's mask is the same for all samples or heads
    mask_mod = block_mask.mask_mod
    of_rows = mask_mod if rows is None else lambda b, h, q, k: mask_mod(b, h, rows[q], k)
    return create_mask(of_rows, batch, heads, shape[2] if rows is None else len(rows), shape[3], like.device)


def _valid(
    score_mod: ScoreMod | None, block_mask: Any, shape: tuple[int, ...], like: Tensor, rows: Tensor | None = None
) -> Tensor | None:
    with torch.no_grad():
        valid = _of_block_mask(block_mask, shape, like, rows)
        if score_mod is not None:
            mod = score_mod
            of_rows = mod if rows is None else lambda score, b, h, q, k: mod(score, b, h, rows[q], k)
            scores = like.new_zeros((*shape[:2], shape[2] if rows is None else len(rows), shape[3]))
            by_scores = allowed(functional.apply_score_mod(of_rows, scores))
            valid = by_scores if valid is None else valid & by_scores
    return valid


def _dropping(score_mod: ScoreMod | None, keep: Tensor, valid: Tensor | None, shape: tuple[int, ...]) -> ScoreMod:
    """Return a score function that drops scores; a fully dropped query row gets equal scores at its valid positions.

    A query row without valid positions keeps the model's scores.
    """
    keep = keep.expand(shape)
    everything = torch.ones((), dtype=torch.bool, device=keep.device)
    permitted = (everything if valid is None else valid).expand(shape)
    keep = keep | ~permitted.any(-1, keepdim=True)
    dead = ~(keep & permitted).any(-1) & permitted.any(-1)

    def dropping(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if score_mod is None else score_mod(score, b, h, q, k)
        kept = torch.where(keep[b, h, q, k], score, -torch.inf)
        equal = torch.where(permitted[b, h, q, k], torch.zeros_like(score), -torch.inf)
        return torch.where(dead[b, h, q], equal, kept)

    return dropping


def _masked(score_mod: ScoreMod | None, mask: Mask, find_valid: FindValid, shape: tuple[int, ...]) -> ScoreMod | None:
    """Return a score function that drops the scores of a mask."""
    if mask.drawn:
        return _drawing(score_mod, mask, shape)
    return score_mod if mask.scores is None else _dropping(score_mod, mask.scores, find_valid(None), shape)


def _in_two_passes(
    run: Callable[..., Any],
    score_mod: ScoreMod | None,
    mask: Mask,
    find_valid: FindValid,
    shape: tuple[int, ...],
    options: dict[str, Any],
) -> Any:
    r"""Drop attention weights without computing them.

    .. math:: O = O_m \, \exp(\ell_m - \ell) / (1 - p)

    :math:`\ell` is the log-sum-exp of all scores, and :math:`O_m, \ell_m` are the output and the log-sum-exp of a
    softmax over the kept scores only.
    """
    all_scores = _masked(score_mod, mask, find_valid, shape)
    decisions = [drawn.keep_at() for drawn in mask.drawn_weights]

    def kept_scores(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if all_scores is None else all_scores(score, b, h, q, k)
        keep = functools.reduce(operator.and_, (decide(b, h, q, k) for decide in decisions))
        return torch.where(keep, score, -torch.inf)

    out, of_kept = _with_aux(run, kept_scores, options)
    _, of_all = _with_aux(run, all_scores, options)
    empty = of_kept.lse == -torch.inf  # no weight of the row is kept
    share = (of_kept.lse.masked_fill(empty, 0.0) - of_all.lse.masked_fill(empty, 0.0)).exp().masked_fill(empty, 0.0)
    for drawn in mask.drawn_weights:
        share = share / drawn.divisor
    return _as_requested((out * share[..., None]).to(out.dtype), of_all, options)


def _with_aux(run: Callable[..., Any], score_mod: ScoreMod | None, options: dict[str, Any]) -> tuple[Tensor, Any]:
    """Run the kernel, and return its output with an ``AuxOutput`` that has the log-sum-exp of scores."""
    rest = {name: value for name, value in options.items() if name not in ("return_lse", "return_aux")}
    request = options.get("return_aux")
    needs_maximum = request is not None and request.max_scores
    return run(score_mod=score_mod, return_aux=torch_flex.AuxRequest(lse=True, max_scores=needs_maximum), **rest)


def _drawing(score_mod: ScoreMod | None, mask: Mask, shape: tuple[int, ...]) -> ScoreMod:
    """Return a score function that decides which scores to drop, so that no mask is in memory.

    A dropped score is ``DROPPED`` instead of minus infinity: so low that it gets no weight beside a kept score, and the
    same for all keys of a fully dropped query row, which is then uniform over its valid positions.
    """
    decisions = [drawn.keep_at() for drawn in mask.drawn]
    if mask.scores is not None:
        keep = mask.scores.expand(shape)
        decisions.append(lambda b, h, q, k: keep[b, h, q, k])

    def drawing(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if score_mod is None else score_mod(score, b, h, q, k)
        kept = functools.reduce(operator.and_, (decide(b, h, q, k) for decide in decisions))
        forbidden = score < FORBIDDEN_BELOW
        return torch.where(kept & ~forbidden, score, torch.where(forbidden, score + FURTHER, DROPPED))

    return drawing


def _scores(query: Tensor, key: Tensor, scale: float | None, score_mod: ScoreMod | None, block_mask: Any) -> Tensor:
    """Compute the scores as the kernel does, in its precision."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ per_head(key, query.shape[1]).to(dtype).transpose(-1, -2)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = functional.apply_score_mod(score_mod, scores)
    valid = _of_block_mask(block_mask, tuple(scores.shape), scores)
    return scores if valid is None else scores.masked_fill(~valid, -torch.inf)


def _zeros(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    options = {"return_lse": args[4] if len(args) > 4 else False, **options}  # after the masks, scale and enable_gqa
    return _returned(out, query.new_zeros((*query.shape[:-1], 1)), options)


def _returned(out: Tensor, scores: Tensor, options: dict[str, Any]) -> Any:
    """Return the output as ``flex_attention`` does: with the logsumexp and maximum of scores, if requested."""
    return _as_requested(out, torch_flex.AuxOutput(scores.logsumexp(-1), scores.amax(-1)), options)


def _as_requested(out: Tensor, aux: torch_flex.AuxOutput, options: dict[str, Any]) -> Any:
    request = options.get("return_aux")
    if request is None:
        return (out, aux.lse) if options["return_lse"] else out
    lse, max_scores = aux.lse if request.lse else None, aux.max_scores if request.max_scores else None
    return out, torch_flex.AuxOutput(lse, max_scores)


def _dispatched(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, or let the active torch function mode handle it."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if has_torch_function(tensors):
        return handle_torch_function(function, tensors, *args, **kwargs)
    return function(*args, **kwargs)


BACKEND = FlexAttention()
