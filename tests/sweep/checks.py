"""Six checks of any attached model: each raises ``AssertionError`` with what is wrong.

A check that a model gives no occasion for (no token ids, no padding, attention written in a kernel) passes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import attnreg
from attnreg.injection.tap import Tap

TOLERANCE = 2e-4


class Answer(attnreg.MaskProvider):
    """Answers with a function of the site."""

    def __init__(self, answer: Callable[[attnreg.AttentionSite], attnreg.Mask | None]) -> None:
        super().__init__()
        self.answer = answer
        self.asked: list[attnreg.AttentionSite] = []

    def forward(self, site: attnreg.AttentionSite) -> attnreg.Mask | None:
        self.asked.append(site)
        return self.answer(site)


def kept(site: attnreg.AttentionSite) -> attnreg.Mask:
    return attnreg.Mask(scores=torch.ones(site.shape, dtype=torch.bool))


def weighed_by_one(site: attnreg.AttentionSite) -> attnreg.Mask:
    return attnreg.Mask(weights=torch.ones(site.shape))


def dropped(site: attnreg.AttentionSite) -> attnreg.Mask:
    return attnreg.Mask(scores=torch.zeros(site.shape, dtype=torch.bool))


def without_key(j: int) -> Callable[[attnreg.AttentionSite], attnreg.Mask]:
    return lambda site: attnreg.Mask(scores=(torch.arange(site.shape[-1]) != j).expand(site.shape))


@contextmanager
def attached(
    model: nn.Module, answer: Callable[[attnreg.AttentionSite], attnreg.Mask | None], options: Mapping[str, Any]
) -> Iterator[tuple[attnreg.injection.AttachHandle, Answer]]:
    provider = Answer(answer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", attnreg.injection.CoverageWarning)
        handle = attnreg.attach(model, provider, **options)
    with handle:
        yield handle, provider


def run(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """All floating-point tensors that come out, without a gradient."""
    leaves = tree_leaves(model(**inputs))
    return [x.detach() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    assert [x.shape for x in a] == [x.shape for x in b]
    pairs = [(x.double().nan_to_num(), y.double().nan_to_num()) for x, y in zip(a, b, strict=True) if x.numel()]
    return max((float((x - y).abs().max() / y.abs().max().clamp(min=1.0)) for x, y in pairs), default=0.0)


def keep_all(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """A mask that keeps everything changes nothing."""
    plain = run(model.train(), inputs)
    for answer in (kept, weighed_by_one):
        with attached(model, answer, options) as (_, provider):
            out = run(model, inputs)
            assert provider.asked, "the provider was not asked"
            assert apart(out, plain) < TOLERANCE, f"{answer.__name__} changes the output by {apart(out, plain):.1e}"


def _rows(outputs: list[Tensor], ids: Tensor) -> list[Tensor]:
    """Outputs with a row for each token."""
    return [x for x in outputs if x.dim() >= 3 and x.shape[:2] == ids.shape]


def dropped_key(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """A token that is a key nowhere has no influence on other positions."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return
    j = 1
    other = {**inputs, "input_ids": ids.clone()}
    other["input_ids"][:, j] = ids[:, j] % 7 + 20
    model.train()
    with attached(model, without_key(j), options) as (_, provider):
        a, b = _rows(run(model, inputs), ids), _rows(run(model, other), ids)
        sites = provider.asked
    length = ids.shape[1]
    if not a or any(site.shape[2:] != (length, length) or not site.shares_keys for site in sites):
        return
    rest = torch.ones(ids.shape, dtype=torch.bool)
    rest[:, j] = False
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:  # padding itself may look anywhere
        rest &= mask.bool()
    difference = apart([x[rest] for x in a], [x[rest] for x in b])
    assert difference < TOLERANCE, f"a dropped key changes other positions by {difference:.1e}"


def nothing_leaks(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Where everything is dropped, no position looks at padding, nor at what comes later in a decoder."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return
    model.train()
    with attached(model, dropped, options) as (handle, _):
        plain = _rows(run(model, inputs), ids)
        if isinstance(mask, Tensor) and mask.shape == ids.shape and not bool(mask.all()):
            other = {**inputs, "input_ids": torch.where(mask.bool(), ids, ids % 7 + 20)}
            out = _rows(run(model, other), ids)
            difference = apart([x[mask.bool()] for x in out], [x[mask.bool()] for x in plain])
            assert difference < TOLERANCE, f"padding changes real positions by {difference:.1e}"
        if all(site.stack == "decoder" for site in handle.sites):
            half = ids.shape[1] // 2
            other = {**inputs, "input_ids": torch.cat([ids[:, :half], ids[:, half:] % 7 + 20], 1)}
            out = _rows(run(model, other), ids)
            difference = apart([x[:, :half] for x in out], [x[:, :half] for x in plain])
            assert difference < TOLERANCE, f"the future changes earlier positions by {difference:.1e}"


def coverage(
    model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any], layers: Mapping[str, int] | None = None
) -> None:
    """There are as many sites as the model has layers, and rates are those that follow from lengths."""
    model.train()
    with attached(model, dropped, options) as (handle, _):
        run(model, inputs)
        rates = handle.drop_rates()
        assert all(rate == 1.0 for rate in rates.values()), f"rates are not 1 where all is dropped: {rates}"
        assert set(rates) == {site.label for site in handle.sites}, "a site was not masked"
        if layers is not None and not options.keys() & {"modules", "stacks", "layers"}:
            found = {stack: sum(site.stack == stack for site in handle.sites) for stack in ("encoder", "decoder")}
            wanted = {stack: layers.get(stack, 0) for stack in found}
            assert found == wanted, f"{found} self-attentions, the model has {wanted}"
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or ids.dim() != 2 or mask.shape != ids.shape:
        return
    with attached(model, without_key(0), options) as (handle, provider):
        run(model, inputs)
        rates, shapes = handle.drop_rates(), {site.label: site for site in provider.asked}
    lengths = mask.sum(1).double()
    full = {"encoder": lengths**2, "decoder": lengths * (lengths + 1) / 2}
    for label, rate in rates.items():
        site = shapes[label]
        stack, length = site.stack, ids.shape[1]
        plain = site.shape[0] == len(ids) and site.shape[2:] == (length, length)
        if stack in full and plain and not _is_windowed(site, full[stack], mask):
            wanted = float(lengths.sum() / full[stack].sum())
            assert abs(rate - wanted) < 1e-5, f"{label}: rate {rate:.4f} for a dropped first key, {wanted:.4f} in truth"


def _is_windowed(site: attnreg.AttentionSite, full: Tensor, mask: Tensor) -> bool:
    """Whether the model itself allows fewer positions than padding and causality leave (or more: left padding)."""
    if not bool(mask[:, 0].all()):
        return True
    last = int(mask[0].sum()) - 1  # of a sample without padding: does its last query see the first key?
    return site.valid is not None and not bool(site.valid.expand(site.shape)[0, :, last, 0].all())


def own_weights(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """What flows through a site is attention: rows sum to 1, nothing is where the model forbids, and only there."""
    model.eval()
    try:
        _check_weights(model, inputs, options)
    except UnderflowError:  # untrained scores may lie so far apart that weights are 0
        model = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.3)
        _check_weights(model, inputs, options)


class UnderflowError(AssertionError):
    """Weights are 0 where they should not."""


def _check_weights(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    with attached(model, kept, options) as (handle, provider):
        torch.manual_seed(0)
        with torch.no_grad(), handle.probing():
            run(model, inputs)
        asked = {site.label: site for site in provider.asked}
        weights: dict[str, Tensor] = {}
        taps = {label: Tap() for label in asked}
        for label, tap in taps.items():
            tap.register_forward_hook(lambda tap, args, out, label=label: weights.update({label: out.detach()}))
        torch.manual_seed(0)
        with torch.no_grad(), handle.tapped(taps):
            run(model, inputs)
    sizes = _numbers_of_heads(getattr(model, "config", None))
    for label, site in asked.items():
        a = weights[label].double()
        assert tuple(a.shape) == tuple(site.shape), f"{label}: weights {tuple(a.shape)}, site {tuple(site.shape)}"
        assert not sizes or site.heads in sizes, f"{label}: {site.heads} heads, the model has {sorted(sizes)}"
        valid = torch.ones_like(a, dtype=torch.bool) if site.valid is None else site.valid.expand(a.shape)
        real = valid.any(-1)
        total = a.sum(-1)[real]
        assert bool((total < 1 + 1e-3).all()), f"{label}: rows sum to {float(total.max()):.3f}"
        assert float(a[~valid & real.unsqueeze(-1)].sum()) < 1e-3, f"{label}: weight where the model forbids"
        if not bool((a > 0)[valid & real.unsqueeze(-1)].float().mean() > 0.99):
            raise UnderflowError(f"{label}: called valid, and never seen")


def _numbers_of_heads(config: Any) -> set[int]:
    """What a configuration, and those in it, say of heads."""
    found: set[int] = set()
    for name, value in getattr(config, "__dict__", {}).items():
        if "heads" in name:
            values = value if isinstance(value, (list, tuple)) else [value]
            found |= {each for each in values if isinstance(each, int)}
        elif hasattr(value, "__dict__"):
            found |= _numbers_of_heads(value)
    return found


CHECKS = {
    "keep-all": keep_all,
    "dropped key": dropped_key,
    "nothing leaks": nothing_leaks,
    "coverage": coverage,
    "own weights": own_weights,
}
