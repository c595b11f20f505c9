"""Attention that decides within its kernels what it drops: nothing of shape ``(Q, K)`` is ever in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnreg.errors import InputError
from attnreg.kernels.device.draws import Draw, table_of
from attnreg.kernels.device.launch_attention import PER_KEY, PER_SCORE, Call, addressable, backward, forward, prepared
from attnreg.kernels.launching import HOST_READS

MOST_DIMENSIONS = 256
DTYPES = torch.float16, torch.bfloat16, torch.float32


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    valid: Tensor | None = None,
    causal: int | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    scale: float | None = None,
    scores: Any = None,
    weights: Sequence[Any] = (),
    rows: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    r"""Compute attention with dropped scores, dropped weights or both.

    As in :func:`attnreg.functional.scores_dropout`, a row whose valid keys are all dropped attends uniformly to them
    (AttendOut, Eq. 4), and a row without a valid key returns zeros. Dropped weights are set to zero after the softmax.

    Args:
        query: ``(B, H, Q, D)``, float16, bfloat16 or float32; D is at most 256.
        key: ``(B, H_kv, K, D)``, where H is a multiple of H_kv.
        value: likewise.
        valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model.
        causal: query q sees the keys up to ``q + causal`` only; ``None`` = all keys.
        bias: a number to add to every score, broadcastable; minus infinity forbids a position. It gets no gradient.
        keep: decisions about scores, bool, broadcastable, ``True`` = kept.
        scale: the factor on the products of queries and keys (default: :math:`1 / \sqrt D`).
        scores: decisions about scores, drawn in the kernel: :class:`attnreg.draws.Drawn`.
        weights: up to two such decisions about weights, or ``None``; kept weights are divided by 1 - p if they rescale.
        rows: the queries that count, such as those that are no padding, bool, broadcastable to ``(B, H, Q, 1)``.
        counts: int64, ``(1,)``, to which the number of dropped units is added: the valid positions in ``rows`` that
            ``keep``, ``scores`` or the first of the ``weights`` drop.

    Returns:
        ``(B, H, Q, D)``.

    Raises:
        InputError: if the arguments do not fit together.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    _check(query, key, value, bias, weights)
    shape = (*query.shape[:3], key.shape[2])
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if not (query.numel() and key.numel()):
        return query * 0
    query, key, value = addressable(query), addressable(key), addressable(value)
    first, second = (*weights, None, None)[:2]
    pairs = [(None, 0) if drawn is None else _draw(drawn, shape, query.device) for drawn in (scores, first, second)]
    draws, kinds = zip(*pairs, strict=True)
    if torch.compiler.is_compiling():
        return _compiled(query, key, value, valid, keep, bias, rows, draws, kinds, causal, scale, counts)
    call = prepared(query, key, valid, keep, bias, rows, draws, kinds, causal, scale)
    out: Tensor = _Attention.apply(query, key, value, call, counts)
    return out


class _Attention(torch.autograd.Function):
    """Attention outside of compiled code, where an operator of torch would take ten times as long to call."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, counts: Tensor | None) -> Tensor:
        out, sums = forward(query, key, value, call, counts)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        grads = backward(grad, query, key, value, out, sums, ctx.call)
        if torch.is_grad_enabled():  # `create_graph=True`
            grads = _Once.apply(query, key, value, grad, *grads)
        return *grads, None, None


class _Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in tensors[-3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        _refuse_twice()


def _refuse_twice(*_: Any) -> None:
    raise RuntimeError("Attention in a kernel has no second derivative; use attnreg.functional instead.")


def _check(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, weights: Sequence[Any]) -> None:
    if not (query.ndim == key.ndim == 4 and key.shape == value.shape and len(query) == len(key)
            and query.shape[3] == key.shape[3] and query.shape[1] % max(1, key.shape[1]) == 0):  # fmt: skip
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise InputError(f"Expected query (B, H, Q, D), key and value (B, H_kv, K, D), got {shapes}.")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        types = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
        raise InputError(f"Expected query, key and value in one of float16, bfloat16 and float32, got {types}.")
    if query.shape[3] > MOST_DIMENSIONS:
        raise InputError(f"Expected heads of at most {MOST_DIMENSIONS} dimensions, got {query.shape[3]}.")
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise InputError("A bias that is trained gets no gradient from this kernel.")
    if len(weights) > 2:
        raise InputError(f"Expected at most two draws of weights, got {len(weights)}.")


def _draw(drawn: Any, shape: tuple[int, int, int, int], device: torch.device) -> tuple[Draw, int]:
    if drawn.shape[3] != shape[3] or any(a not in (1, b) for a, b in zip(drawn.shape, shape, strict=True)):
        raise InputError(f"Expected decisions for {shape}, got {tuple(drawn.shape)}.")
    size, samples = drawn.shape[0], drawn.samples
    first, queries, fits = table_of(drawn.first_query, size, device)
    _, keys, fit = table_of(drawn.first_key, size, device)
    if not (fits and fit) or (samples is not None and samples.shape != (size,)):
        raise InputError(f"Expected `samples`, `first_query` and `first_key` of decisions for {size} samples.")
    samples = None if samples is None else samples.to(device)
    kind = PER_KEY if drawn.shape[2] == 1 else PER_SCORE
    flags = int(size > 1), int(drawn.shape[1] > 1), int(drawn.rescale)
    return Draw(drawn.seed, drawn.p, samples, queries, keys, first, *flags), kind


def _compiled(query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, keep: Tensor | None, bias: Tensor | None,
              rows: Tensor | None, draws: Sequence[Draw | None], kinds: Sequence[int], causal: int | None,
              scale: float, counts: Tensor | None) -> Tensor:  # fmt: skip
    """Call the operator; its seeds and rates are tensors, so that compiled code serves all of them."""
    seeds, rates, tables, layout = [], [], [], []
    for slot, draw in enumerate(draws):
        if draw is not None:
            seeds.append(torch.as_tensor(draw.seed))
            rates.append(torch.as_tensor(draw.rate))
            tables += [draw.samples, draw.queries, draw.keys]
            layout += [slot, kinds[slot], *draw[5:]]
    out, _, dropped = attention_op(query, key, value, valid, keep, bias, rows, seeds, rates, tables, layout, causal,
                                   scale, counts is not None)  # fmt: skip
    if counts is not None:
        counts.add_(dropped)
    return out


def _call(query: Tensor, key: Tensor, valid: Tensor | None, keep: Tensor | None, bias: Tensor | None,
          rows: Tensor | None, seeds: Sequence[Tensor], rates: Sequence[Tensor], tables: Sequence[Tensor | None],
          layout: Sequence[int], causal: int | None, scale: float) -> Call:  # fmt: skip
    draws: list[Draw | None] = [None] * 3
    kinds = [0] * 3
    for i, (seed, rate) in enumerate(zip(seeds, rates, strict=True)):
        slot, kinds[slot], *rest = layout[6 * i : 6 * i + 6]
        draws[slot] = Draw(int(seed), rate, tables[3 * i], tables[3 * i + 1], tables[3 * i + 2], *rest)
    return prepared(query, key, valid, keep, bias, rows, draws, kinds, causal, scale)


# The schemas are written out, because versions of torch differ in how they infer schemas.
MASKS = "Tensor? valid, Tensor? keep, Tensor? bias"
DRAWS = "Tensor[] seeds, Tensor[] rates, Tensor?[] tables, SymInt[] layout, SymInt? causal, float scale"
FORWARD = f"(Tensor query, Tensor key, Tensor value, {MASKS}, Tensor? rows, {DRAWS}, bool counted)"
BACKWARD = f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, {MASKS}, {DRAWS})"
THREE = " -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("attnreg::attention", mutates_args=(), schema=FORWARD + THREE, tags=HOST_READS)
def attention_op(query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, keep: Tensor | None,
                 bias: Tensor | None, rows: Tensor | None, seeds: Sequence[Tensor], rates: Sequence[Tensor],
                 tables: Sequence[Tensor | None], layout: Sequence[int], causal: int | None, scale: float,
                 counted: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output, one number per row, and the number of dropped units."""
    dropped = torch.zeros(1, dtype=torch.int64, device=query.device)
    call = _call(query, key, valid, keep, bias, rows, seeds, rates, tables, layout, causal, scale)
    out, sums = forward(query, key, value, call, dropped if counted else None)
    return out, sums, dropped


@attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, size = query.shape
    out = query.new_empty(batch, queries, heads, size).transpose(1, 2)
    return out, query.new_empty(batch, heads, queries, dtype=torch.float32), query.new_empty(1, dtype=torch.int64)


@torch.library.custom_op("attnreg::attention_backward", mutates_args=(), schema=BACKWARD + THREE, tags=HOST_READS)
def attention_backward_op(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
                          valid: Tensor | None, keep: Tensor | None, bias: Tensor | None, seeds: Sequence[Tensor],
                          rates: Sequence[Tensor], tables: Sequence[Tensor | None], layout: Sequence[int],
                          causal: int | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value."""
    call = _call(query, key, valid, keep, bias, None, seeds, rates, tables, layout, causal, scale)
    return backward(grad, query, key, value, out, sums, call)


@attention_backward_op.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    grads = []
    for x in (query, key, value):
        batch, heads, length, size = x.shape
        grads.append(x.new_empty(batch, length, heads, size).transpose(1, 2))
    return tuple(grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, valid, keep, bias, _, seeds, rates, tables, layout, causal, scale, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(query, key, value, output[0], output[1], valid, keep, bias, *seeds, *rates, *tables)
    ctx.rest = layout, causal, scale


def _no_gradients(values: Sequence[Any]) -> list[None] | None:
    return [None] * len(values) if all(isinstance(value, Tensor) for value in values) else None  # as torch takes lists


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    (*tensors,) = ctx.saved_tensors
    n = (len(tensors) - 8) // 5
    first, seeds, rates, tables = tensors[:8], tensors[8 : 8 + n], tensors[8 + n : 8 + 2 * n], tensors[8 + 2 * n :]
    grads = attention_backward_op(grad, *first, seeds, rates, tables, *ctx.rest)
    lists = (_no_gradients(values) for values in (seeds, rates, tables, ctx.rest[0]))
    return *grads, *[None] * 4, *lists, None, None, None


attention_op.register_autograd(_backward, setup_context=_save)
attention_backward_op.register_autograd(_refuse_twice)
