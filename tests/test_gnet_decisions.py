"""G-Net's decisions: their rate on the first batch, what they share, and their probability."""

import itertools

import pytest
import torch
from torch import nn

import attnreg
from attnreg.draws import Draws, draws_from
from tests.test_gnet import masks_and_heads, small

ragged = {
    "input_ids": torch.tensor([[1, 5, 2, 5], [7, 5, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}
grains = pytest.mark.parametrize("decisions", ["unit", "key", "type", "word", "batch"])


def by_type(values):
    """The valid ones of values ``(B, N, N)`` for each token id, at all of its places."""
    places = [(1, [(0, 0)]), (5, [(0, 1), (0, 3), (1, 1)]), (2, [(0, 2)]), (7, [(1, 0)])]
    return {token: torch.cat([values[b, : [4, 2][b], key] for b, key in found]) for token, found in places}


@grains
@masks_and_heads
@pytest.mark.parametrize("asked", [0.05, 0.5, 0.9])
def test_the_first_batch_is_kept_at_the_rate_asked_for(decisions, masks, heads, asked):
    """In every layer, however far apart the logits are, and counting real tokens alone."""
    options = {"masks_per_layer": masks, "num_heads": heads, "decisions": decisions}
    torch.manual_seed(0)
    net = attnreg.GNetProvider(11, 6, 3, 8, initial_keep=asked, **options).double()
    for parameter in net.network.parameters():
        nn.init.normal_(parameter, std=0.7)
    net.prepare(ragged)
    logits, real = net.logits(ragged), net.units(ragged)
    for layer in range(3):
        chances = []
        for each in range(heads):
            rows = [logits[b, layer, each][: int(n), : int(n)] for b, n in enumerate([4, 2])]
            if decisions == "unit":
                chances += [torch.sigmoid(row).flatten() for row in rows]
            elif decisions == "key":
                chances += [torch.sigmoid(row.mean(0)) for row in rows]
            elif decisions == "word":
                chances += [torch.sigmoid(own.mean()).view(1) for own in by_type(logits[:, :, each].mean(1)).values()]
            elif decisions == "type":
                chances += [torch.sigmoid(own.mean()).view(1) for own in by_type(logits[:, layer, each]).values()]
            else:
                chances += [torch.sigmoid(torch.cat([row.flatten() for row in rows]).mean()).view(1)]
        assert torch.cat(chances).mean().item() == pytest.approx(asked, abs=1e-9)
    assert real.sum() == 20
    bias = net.network.bias.clone()
    net.prepare({"input_ids": torch.tensor([[9, 9, 8]])})
    net.sample(ragged)
    assert torch.equal(net.network.bias, bias)  # the first batch alone
    saved = attnreg.GNetProvider(11, 6, 3, 8, **options).double()
    saved.load_state_dict(net.state_dict())
    saved.prepare({"input_ids": torch.tensor([[9, 9, 8]])})
    assert torch.equal(saved.network.bias, bias)


@grains
@masks_and_heads
def test_decisions_are_shared_and_their_probability_counts_each_once(decisions, masks, heads):
    net = small(masks_per_layer=masks, num_heads=heads, decisions=decisions)
    torch.manual_seed(1)
    value = net.sample(ragged)
    keep, logits = net.keep, net.logits(ragged)
    lengths = [4, 2]
    expected = []
    for b, n in enumerate(lengths):
        total, count = 0.0, 0
        for layer, m in itertools.product(range(3), range(masks * heads)):
            own = logits[:, layer, m // masks]
            inside = keep[b, layer, m, :n, :n]
            if decisions == "unit":
                pairs = zip(own[b, :n, :n].flatten(), inside.flatten(), strict=True)
            elif decisions == "key":
                assert (inside == inside[:1]).all()
                pairs = zip(own[b, :n, :n].mean(0), inside[0], strict=True)
            elif decisions in ("type", "word"):  # of the whole batch: the fraction is the same for all samples
                if decisions == "word":  # of all layers: each counts them once more, and so does the divisor
                    assert torch.equal(keep[:, layer], keep[:, 0])
                    own = logits[:, :, m // masks].mean(1)
                of_logits, of_masks = by_type(own), by_type(keep[:, layer, m])
                assert all((each == each[0]).all() for each in of_masks.values())
                pairs = [(of_logits[token].mean(), of_masks[token][0]) for token in of_masks]
            else:
                assert (keep[:, layer, m] == keep[0, layer, m, 0, 0]).all()
                every = torch.cat([own[i, :k, :k].flatten() for i, k in enumerate(lengths)])
                pairs = [(every.mean(), inside[0, 0])]
            for logit, kept in pairs:
                total, count = total + torch.log(torch.sigmoid(logit if kept else -logit)), count + 1
        expected.append(total / count)
    assert torch.allclose(value, torch.stack(expected), atol=1e-12)
    assert torch.equal(net.log_prob(ragged, keep), value)
    found, slow = (torch.autograd.grad(each.sum(), [*net.parameters()]) for each in (value, torch.stack(expected)))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, slow, strict=True))


@grains
def test_decisions_come_as_often_as_they_are_probable(decisions):
    torch.manual_seed(0)
    net = small(decisions=decisions)
    net.calibrate(ragged)
    mean = 0
    for _ in range(400):
        net.prepare(ragged)
        mean = mean + net.keep[..., :2, :2].double() / 400
    logits = net.logits(ragged)[..., :2, :2]
    if decisions == "key":
        logits = torch.stack([net.logits(ragged)[b, :, :, :n, :2].mean(2, keepdim=True) for b, n in enumerate([4, 2])])
    if decisions == "type":
        logits = torch.stack([by_type(own)[5].mean() for own in net.logits(ragged)[:, :, 0].unbind(1)])
        mean = mean[:, :, 0, 0, 1]
    if decisions == "word":
        logits, mean = by_type(net.logits(ragged)[:, :, 0].mean(1))[5].mean(), mean[:, :, 0, 0, 1]
    if decisions == "batch":
        every = [net.logits(ragged)[b, :, :, :n, :n].flatten(2) for b, n in enumerate([4, 2])]
        logits = torch.cat(every, -1).mean(-1)[None, :, :, None, None]
    assert (mean - torch.sigmoid(logits)).abs().max() < 5 * 0.5 / 20


@grains
def test_draws_repeat_with_the_seed_of_their_pass_whatever_torch_drew(decisions):
    net, kept = small(decisions=decisions), []
    for seed in (3, 3, 4, 5, 6):
        with draws_from(Draws(seed)):
            net.prepare(ragged)
        torch.rand(1)
        kept.append(net.keep)
    assert torch.equal(kept[0], kept[1])
    assert any(not torch.equal(kept[0], other) for other in kept[2:])
