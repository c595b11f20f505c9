"""Which positions count, which a model forbids, and where sequences begin: against loops."""

import math

import pytest
import torch

import attnreg
from attnreg import functional
from attnreg.functional.validity import allowed
from tests.sweep.checks import Answer


def starts_slowly(valid, self_attention=True):
    """(B, K) by loops, from (B, 1, Q, K)."""
    batch, _, queries, keys = valid.shape
    out = torch.zeros(batch, keys, dtype=torch.bool)
    for b in range(batch):
        if not self_attention:
            seen = [k for k in range(keys) if any(valid[b, 0, q, k] for q in range(queries))]
            if seen:
                out[b, seen[0]] = True
            continue
        for q in range(queries):
            mine = [k for k in range(keys) if valid[b, 0, q, k]]
            out[b, q] = bool(mine) and mine[0] == q
    return out


def packed(*lengths, causal=False):
    blocks = [torch.ones(n, n).tril() if causal else torch.ones(n, n) for n in lengths]
    return torch.block_diag(*blocks).bool()


PATTERNS = {
    "all": torch.ones(2, 1, 6, 6, dtype=torch.bool),
    "right padding": (torch.arange(6) < torch.tensor([[6], [4]])).view(2, 1, 1, 6).expand(2, 1, 6, 6),
    "left padding": (torch.arange(6) >= torch.tensor([[0], [2]])).view(2, 1, 1, 6).expand(2, 1, 6, 6),
    "causal": torch.ones(6, 6).tril().bool().expand(2, 1, 6, 6),
    "causal, left padding": torch.ones(6, 6).tril().bool() & (torch.arange(6) >= torch.tensor([[0], [2]])).view(2, 1, 1, 6),
    "packed": torch.stack([packed(2, 4), packed(1, 3, 2)]).unsqueeze(1),
    "packed, causal": torch.stack([packed(2, 4, causal=True), packed(5, 1, causal=True)]).unsqueeze(1),
    "window": ((torch.arange(6)[:, None] - torch.arange(6)).abs() <= 1).expand(2, 1, 6, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_sequence_starts(name):
    valid = PATTERNS[name]
    shape = (2, 3, 6, 6)
    assert torch.equal(functional.sequence_starts(valid, shape), starts_slowly(valid))
    narrow = valid[:, :, :1] if name.endswith("padding") and "causal" not in name else valid
    assert torch.equal(functional.sequence_starts(narrow, shape), starts_slowly(valid))
    cross = functional.sequence_starts(valid[..., :4, :], (2, 3, 4, 6), self_attention=False)
    assert torch.equal(cross, starts_slowly(valid[..., :4, :], self_attention=False))


@pytest.mark.parametrize("name", PATTERNS)
def test_token_dropout_keeps_the_first_token_of_every_sequence(name):
    valid = PATTERNS[name]
    site = attnreg.AttentionSite(shape=(2, 3, 6, 6), valid=valid, stack="encoder")
    dropping = attnreg.TokenDropout(p=1.0, keep_whole=0.0)
    assert torch.equal(dropping(site).scores[:, 0, 0], starts_slowly(valid))
    # Packed sequences are kept whole, or not, each by itself; and all layers agree.
    provider = attnreg.TokenDropout(p=1.0, keep_whole=0.5)
    seen = set()
    for _ in range(40):
        provider.prepare({})
        keep = provider(site).scores[:, 0, 0]
        assert torch.equal(keep, provider(site).scores[:, 0, 0])
        for row, starts in zip(keep, starts_slowly(valid), strict=True):
            number = starts.cumsum(0)
            for sequence in number.unique():
                inside = row[(number == sequence) & ~starts]
                assert inside.all() or not inside.any()
                seen.add((name, bool(inside.all()), int(sequence)))
    assert {whole for _, whole, _ in seen} == {True, False} or name == "window"


def test_token_dropout_refuses_attention_with_keys_of_its_own_for_each_query():
    with pytest.raises(ValueError, match="at local each query has its own keys: choose other attention"):
        attnreg.TokenDropout(0.1).check([attnreg.SiteInfo(name="local", shares_keys=False)], None)


def test_the_first_position_of_a_structure_is_not_padding():
    valid = PATTERNS["left padding"]
    mask = attnreg.StructuralMask(1, keep_first=True)(attnreg.AttentionSite(shape=(2, 1, 6, 6), valid=valid)).scores
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 1
    for b, first in ((0, 0), (1, 2)):
        expected = near.clone()
        expected[first] = expected[:, first] = True
        assert torch.equal(mask.expand(2, 1, 6, 6)[b, 0], expected)


@pytest.mark.parametrize("keep", [(6,), (6, 6), (2, 1, 6, 6), (2, 3, 6, 6), (2, 1, 1, 6), (1, 3, 1, 1)])
@pytest.mark.parametrize("name", PATTERNS)
def test_units_are_valid_positions_of_real_rows_and_drop_rates_count_them_alone(name, keep):
    valid, shape = PATTERNS[name], (2, 3, 6, 6)
    keep = torch.rand(keep, generator=torch.Generator().manual_seed(0)) < 0.5
    units = functional.units(valid, shape)
    full, counted = keep.expand(shape), units.expand(shape)
    dropped = total = 0
    for b, h, q, k in torch.ones(shape).nonzero().tolist():
        is_unit = bool(valid[b, 0, q, k]) and bool(valid[b, 0, :, q].any())  # somebody may attend to position q
        assert bool(counted[b, h, q, k]) == is_unit
        total += is_unit
        dropped += is_unit and not full[b, h, q, k]
    of_heads = torch.stack([valid[0, 0], valid[1, 0], valid[0, 0] & valid[1, 0]])  # without a dimension of samples
    assert torch.equal(functional.units(of_heads, shape), functional.units(of_heads[None], shape)[0])
    assert float(functional.drop_rate(keep, units)) == pytest.approx(dropped / total, abs=1e-6)
    assert float(functional.drop_rate(keep)) == pytest.approx(float((~full).float().mean()), abs=1e-6)


MINUS = torch.finfo(torch.float32).min


@pytest.mark.parametrize("value", [-100.0, -1000.0, -1e4, -1e30, MINUS, -math.inf])
@pytest.mark.parametrize("name", ["right padding", "left padding", "causal", "packed", "window"])
def test_what_an_additive_mask_forbids(name, value):
    valid = PATTERNS[name]
    mask = torch.zeros(valid.shape).masked_fill(~valid, value)
    assert torch.equal(allowed(mask), valid)
    scores = 4 * torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)) + mask
    assert torch.equal(allowed(scores), valid.expand(2, 3, 6, 6))


def test_slopes_and_single_high_scores_are_no_masks():
    distance = (torch.arange(300) - torch.arange(300)[:, None]).float()
    slopes = torch.tensor([2.0**-n for n in range(1, 9)]).view(1, 8, 1, 1)
    alibi = slopes * distance.clamp(max=0.0) - slopes * distance.clamp(min=0.0)
    assert allowed(alibi).all()
    causal = torch.ones(300, 300).tril().bool()
    assert torch.equal(allowed(alibi.masked_fill(~causal, MINUS)), causal.expand(1, 8, 300, 300))
    sink = torch.randn(1, 8, 5, 5)
    sink[:, 3, :, 0] += 90  # one head looks at one key alone
    assert allowed(sink).all()


@pytest.mark.parametrize(("value", "is_allowed"), [(-49.0, True), (-51.0, True), (-53.0, False)])
def test_a_low_score_is_forbidden_only_below_a_gap(value, is_allowed):
    scores = torch.tensor([0.0, -22.0, value])  # 51 is far enough below the highest, but not below the next
    assert allowed(scores).tolist() == [True, True, is_allowed]


class Padded(torch.nn.Module):
    """Attention with a mask of one's own making."""

    def __init__(self, value, fused):
        super().__init__()
        self.value, self.fused = value, fused
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x, padding):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.zeros(len(x), 1, 1, x.shape[1]).masked_fill(padding[:, None, None], self.value)
        if self.fused:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (q @ k.transpose(-1, -2) / 2 + mask).softmax(-1) @ v


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [-100.0, -1000.0, -1e4, -math.inf])
def test_a_row_of_which_all_is_dropped_does_not_look_at_padding(value, fused):
    torch.manual_seed(0)
    model, x = Padded(value, fused), torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    nothing = Answer(lambda site: attnreg.Mask(scores=torch.zeros(site.shape[-2:], dtype=torch.bool)))
    with attnreg.attach(model, nothing, example_inputs=(x, padding)) as handle:
        out = model(x, padding)
        assert handle.drop_rates() == {"encoder.0": 1.0}
    value = model.qkv(x).chunk(3, -1)[2].unflatten(-1, (2, 4)).transpose(1, 2)
    assert torch.allclose(out[0], value[0].mean(1, keepdim=True).expand_as(out[0]), atol=1e-6)
    assert torch.allclose(out[1], value[1, :, :3].mean(1, keepdim=True).expand_as(out[1]), atol=1e-6)
