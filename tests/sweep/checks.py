"""Checks of any attached model: each raises ``AssertionError`` with what is wrong.

A check that a model gives no occasion for (no token ids, no padding, attention written in a kernel) passes.
"""

import copy
import warnings
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import attnreg
from attnreg.injection.backends import Tap

TOLERANCE = 2e-4


class Answer(attnreg.MaskProvider):
    """Answers with a function of the site, and remembers the sites."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.asked = answer, []

    def forward(self, site):
        self.asked.append(site)
        return self.answer(site)


def everywhere(**value):
    """One value for all entries of the scores or of the weights."""
    return lambda site: attnreg.Mask(**{name: torch.full(site.shape, each) for name, each in value.items()})


kept, weighed_by_one = everywhere(scores=True), everywhere(weights=1.0)
dropped, without_attention = everywhere(scores=False), everywhere(weights=0.0)


def without_key(j):
    return lambda site: attnreg.Mask(scores=(torch.arange(site.shape[-1]) != j).expand(site.shape))


@contextmanager
def attached(model, answer, options):
    """A function of the site, or a provider, is attached; no warning tells what is not covered."""
    provider = answer if isinstance(answer, attnreg.Regularizer) else Answer(answer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", attnreg.injection.CoverageWarning)
        handle = attnreg.attach(model, provider, **options)
    with handle:
        yield handle, provider


def run(model, inputs):
    """All floating-point tensors that come out, without a gradient; what is random in the model is the same each time."""
    torch.manual_seed(0)
    return [x.detach() for x in floats(model(**inputs))]


def floats(out):
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]


def apart(a, b):
    """The largest difference, relative to the largest value."""
    assert [x.shape for x in a] == [x.shape for x in b]
    pairs = [(x.double().nan_to_num(), y.double().nan_to_num()) for x, y in zip(a, b, strict=True) if x.numel()]
    return max((float((x - y).abs().max() / y.abs().max().clamp(min=1.0)) for x, y in pairs), default=0.0)


def keep_all(model, inputs, options):
    """A mask that keeps everything changes nothing."""
    difference = _kept_and_plain(model.train(), inputs, options)
    if difference > TOLERANCE:  # a model may choose by numbers that are nearly equal, so that rounding shows
        try:
            double = {
                k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()
            }
            precise = {**options, "example_inputs": double} if "example_inputs" in options else options
            difference = _kept_and_plain(copy.deepcopy(model).double(), double, precise)
        except RuntimeError:
            pass
    assert difference < TOLERANCE, f"a mask that keeps everything changes the output by {difference:.1e}"


def _kept_and_plain(model, inputs, options):
    plain = run(model, inputs)
    differences = []
    with attached(model, kept, options) as (_, provider):
        for provider.answer in (kept, weighed_by_one):
            provider.asked.clear()
            differences.append(apart(run(model, inputs), plain))
            assert provider.asked, "the provider was not asked"
    return max(differences)


def tokens_of(inputs):
    """The token ids of a batch, and the mask that tells which of them are padding; None for what there is not."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    ids = ids if isinstance(ids, Tensor) and ids.dim() == 2 else None
    return ids, mask if ids is not None and isinstance(mask, Tensor) and mask.shape == ids.shape else None


def _other(ids):
    """Other tokens: lower ones may stand for pieces of an image, so they stay."""
    return torch.where(ids < 20, ids, ids % 7 + 20)


def _rows(outputs, ids):
    """Outputs with a row for each token."""
    return [x for x in outputs if x.dim() >= 3 and x.shape[:2] == ids.shape]


def has_other_ways(model, inputs, options):
    """Whether a token has an influence on other positions where no attention has any output."""
    return _influence(model.train(), inputs, options, without_attention, square=False) > TOLERANCE / 20


def _influence(model, inputs, options, answer, *, j=1, square=True):
    """How much the token at j changes other positions; 0 where there is no way to tell.

    There is none if attention is not among tokens (``square``), or if the model itself chooses keys by their content.
    """
    ids, mask = tokens_of(inputs)
    if ids is None:
        return 0.0
    other = {**inputs, "input_ids": ids.clone()}
    other["input_ids"][:, j] = ids[:, j] % 7 + 20
    with attached(model, answer, options) as (_, provider):
        a = _rows(run(model, inputs), ids)
        sites, provider.asked = provider.asked, []
        try:
            b = _rows(run(model, other), ids)
        except ValueError:  # this token stands for something, such as a piece of an image
            return 0.0
    length = ids.shape[1]
    if square and any(site.shape[2:] != (length, length) or not site.shares_keys for site in sites):
        return 0.0
    if not all(_same_keys(one, two) for one, two in zip(sites, provider.asked, strict=True)):
        return 0.0
    rest = torch.ones(ids.shape, dtype=torch.bool)
    rest[:, j] = False
    if mask is not None:  # padding itself may look anywhere
        rest &= mask.bool()
    return apart([x[rest] for x in a], [x[rest] for x in b])


def _same_keys(one, two):
    """Whether the model allows the same in two passes."""
    if one.valid is None or two.valid is None:
        return one.valid is two.valid
    return torch.equal(one.valid, two.valid)


def dropped_key(model, inputs, options):
    """A token that is a key nowhere has no influence on other positions."""
    difference = _influence(model.train(), inputs, options, without_key(1))
    assert difference < TOLERANCE, f"a dropped key changes other positions by {difference:.1e}"


def nothing_leaks(model, inputs, options):
    """Where everything is dropped, no position looks at padding, nor at what comes later in a decoder."""
    ids, mask = tokens_of(inputs)
    if ids is None:
        return
    with attached(model.train(), dropped, options) as (handle, _):
        plain = _rows(run(model, inputs), ids)
        others = {}
        if mask is not None and not bool(mask.all()):
            others["padding"] = mask.bool()
        if all(site.stack == "decoder" for site in handle.sites):
            others["the future"] = (torch.arange(ids.shape[1]) < ids.shape[1] // 2).expand(ids.shape)
        for what, real in others.items():
            try:
                out = _rows(run(model, {**inputs, "input_ids": torch.where(real, ids, _other(ids))}), ids)
            except ValueError:  # as others may
                continue
            difference = apart([x[real] for x in out], [x[real] for x in plain])
            assert difference < TOLERANCE, f"{what} changes other positions by {difference:.1e}"


def coverage(model, inputs, options, layers=None):
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
    if not _rates_follow(model, inputs, options):
        assert _rates_follow(_shrunken(model), inputs, options), (
            "rates are not those that follow from the model's weights"
        )


def _rates_follow(model, inputs, options):
    """Whether the rate of a dropped first key is its share of what the model attends to, in rows that are no padding."""
    weights, asked = weights_of(model.eval(), inputs, options)
    with attached(model.train(), without_key(0), options) as (handle, provider):
        run(model, inputs)
        rates, dropped = handle.drop_rates(), {site.label: site for site in provider.asked}
    for label, site in asked.items():
        seen = weights[label] > 0
        if site.in_parts or site.stack == "cross" or seen.shape[-2] != seen.shape[-1]:
            continue
        if not _same_keys(site, dropped[label]):
            continue
        seen = seen & seen.any((1, 2))[:, None, :, None]  # what nobody looks at is padding, wherever it looks itself
        if site.valid is not None:
            seen = seen & site.valid.any(-1, keepdim=True)  # softmax is uniform where nothing is allowed
        if abs(rates[label] - float(seen[..., 0].sum() / seen.sum())) > 1e-5:
            return False
    return True


def _shrunken(model):
    """Untrained scores may lie so far apart that weights are 0: those of this copy are nearer to each other."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model


def weights_of(model, inputs, options):
    """The plain model's attention weights, and the sites, by label."""
    with attached(model, kept, options) as (handle, provider):
        with torch.no_grad(), handle.probing():
            run(model, inputs)
        asked = {site.label: site for site in provider.asked}
        weights = {}
        taps = {label: Tap() for label in asked}
        for label, tap in taps.items():
            tap.register_forward_hook(lambda tap, args, out, label=label: weights.update({label: out.detach()}))
        with torch.no_grad(), handle.tapped(taps):
            run(model, inputs)
    return weights, asked


def own_weights(model, inputs, options):
    """What flows through a site is attention: rows sum to 1, nothing is where the model forbids, and only there."""
    model.eval()
    try:
        _check_weights(model, inputs, options)
    except UnderflowError:
        _check_weights(_shrunken(model), inputs, options)


class UnderflowError(AssertionError):
    """Weights are 0 where they should not."""


def _check_weights(model, inputs, options):
    weights, asked = weights_of(model, inputs, options)
    sizes = _numbers_of_heads(getattr(model, "config", None))
    for label, site in asked.items():
        a = weights[label].double()
        assert tuple(a.shape) == tuple(site.shape), f"{label}: weights {tuple(a.shape)}, site {tuple(site.shape)}"
        heads = a.shape[1] if a.shape[1] > 1 or len(a) > len(next(iter(inputs.values()))) else 0  # one is always right
        fits = not heads or not sizes or any(size % heads == 0 for size in sizes if heads > 1 or size == 1)
        assert fits, f"{label}: {heads} heads, the model has {sorted(sizes)}"
        valid = torch.ones_like(a, dtype=torch.bool) if site.valid is None else site.valid.expand(a.shape)
        real = valid.any(-1)
        total = a.sum(-1)[real]
        assert bool((total < 1 + 1e-3).all()), f"{label}: rows sum to {float(total.max()):.3f}"
        assert float(a[~valid & real.unsqueeze(-1)].sum()) < 1e-3, f"{label}: weight where the model forbids"
        if not bool((a > 0)[valid & real.unsqueeze(-1)].float().mean() > 0.99):
            raise UnderflowError(f"{label}: called valid, and never seen")


def _numbers_of_heads(config):
    """What a configuration, and those in it, say of heads (or of groups of channels that attend to each other)."""
    found = set()
    for name, value in getattr(config, "__dict__", {}).items():
        if "head" in name or "groups" in name:
            values = value if isinstance(value, (list, tuple)) else [value]
            found |= {each for each in values if isinstance(each, int)}
        elif hasattr(value, "__dict__"):
            found |= _numbers_of_heads(value)
    return found


class States(attnreg.HiddenProvider):
    """Leaves hidden states as they are, and remembers them."""

    where = ("embeddings", "input", "output")

    def __init__(self):
        super().__init__()
        self.asked = []

    def forward(self, site, states):
        self.asked.append((site, states.detach()))


def hidden_states(model, inputs, options):
    """Each hidden-state site is asked once, has samples first, and knows what is padding; or the model is refused."""
    plain, provider = run(model.train(), inputs), States()
    try:
        handle = attnreg.attach(model, provider, example_inputs=inputs)
    except attnreg.errors.InputError:
        return
    with handle:
        assert apart(run(model, inputs), plain) == 0.0, "looking at hidden states changes the output"
        labels = [site.label for site, _ in provider.asked]
        assert sorted(labels) == sorted(site.label for site in handle.sites), f"asked at {labels}"
        ids, mask = tokens_of(inputs)
        if ids is None or len(ids) < 2:
            return
        for site, _ in provider.asked:
            if mask is not None and mask.shape == site.shape[:2]:
                decodes = "decoder_input_ids" in inputs and site.stack == "decoder"
                assert decodes or torch.equal(site.tokens, mask.bool()), f"{site.label}: other tokens are padding"
        other = ids.clone()
        other[1] = _other(ids[1])
        seen = []
        with torch.no_grad(), handle.probing():
            for each in (ids, other):
                provider.asked = []
                try:
                    run(model.eval(), {**inputs, "input_ids": each})
                except ValueError:  # as others may
                    return
                seen.append([(site.label, states[0]) for site, states in provider.asked if len(states) == len(ids)])
        for (label, one), (_, two) in zip(*seen, strict=True):
            assert apart([one], [two]) < TOLERANCE, f"{label}: the first dimension is not of samples"


CHECKS = {"keep-all": keep_all, "dropped key": dropped_key, "nothing leaks": nothing_leaks, "coverage": coverage, "own weights": own_weights, "hidden states": hidden_states}  # fmt: skip
