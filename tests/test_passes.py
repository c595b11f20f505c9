"""Which forward passes are masked, where they may begin, and which are refused."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.draws import new_seed
from attnreg.errors import CoverageWarning, NoAttentionError
from tests.helpers.cases import MODELS, output
from tests.helpers.handwritten import Attention, Layers, fused, plain, split
from tests.helpers.passes import without_dropout
from tests.sweep.checks import Answer, dropped

BERT = next(case for case in MODELS if case.name == "bert")


def test_passes_without_gradients_are_those_of_the_plain_model():
    model, batch = BERT.build(), BERT.batch()
    without_dropout(model)
    expected = output(model, batch)
    with attnreg.attach(model, attnreg.AttentionLayerDrop(1.0)) as handle:
        with torch.no_grad():
            assert torch.equal(output(model, batch), expected)  # a reference, or a rollout
            assert handle.drop_rates() == {}
            with handle.probing():
                assert not torch.equal(output(model, batch), expected)
                assert handle.drop_rates() == {"encoder.0": 1.0, "encoder.1": 1.0}
        model.eval()
        with handle.probing(), torch.inference_mode():
            probed = output(model, batch)
            assert not torch.equal(probed, expected)
        assert torch.equal(output(model, batch), expected)
        model.train()
        assert torch.equal(output(model, batch), probed)


class Wrapper(nn.Module):
    """Calls the forward of what it wraps, as peft and sentence-transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model.forward(**batch)

    def training_step(self, batch):
        return self.model(**batch)


@pytest.mark.parametrize("place", ["model", "wrapper"])
def test_a_pass_may_begin_wherever_the_model_is_entered(place):
    model, batch = BERT.build(), BERT.batch()
    wrapper = Wrapper(model)
    provider = attnreg.TokenDropout(0.5, 0.0)
    seeds = []
    entries = wrapper, lambda **batch: wrapper.training_step(batch), model, model.forward, model.bert.forward
    given = {} if place == "model" else {"example_inputs": batch}
    with attnreg.attach(model if place == "model" else wrapper, provider, **given):
        for enter in entries:
            enter(**batch)
            seeds.append(int(provider.seed))
    assert len(set(seeds)) == 5


def test_a_pass_that_begins_in_the_middle_is_refused_where_it_matters():
    model = BERT.build()
    x = torch.randn(2, 5, 16)
    with (
        attnreg.attach(model, attnreg.TokenDropout(0.5, 0.0)),
        pytest.raises(RuntimeError, match=r"TokenDropout draws its masks when a forward pass of the attached model"),
    ):
        model.bert.encoder.layer[1](x)
    with attnreg.attach(model, attnreg.AttentionLayerDrop(1.0)) as handle:
        model.bert.encoder.layer[1](x)
        assert handle.drop_rates() == {"encoder.1": 1.0}


def test_an_error_in_a_pass_ends_it():
    model = BERT.build()
    with attnreg.attach(model, attnreg.TokenDropout(0.5, 0.0)) as handle:
        with pytest.raises(IndexError):
            model(torch.tensor([[99]]))
        assert not handle._passes.latest.is_running
        assert handle._passes.mode is None


@pytest.mark.parametrize("provider", [attnreg.AttentionLayerDrop(0.5), attnreg.LayerDrop(0.5)], ids=["attention", "block"])  # fmt: skip
def test_rates_under_checkpointing_are_those_of_the_forward_pass(provider):
    model, batch = BERT.build(), BERT.batch()
    for block in BERT.blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    seen = set()
    with attnreg.attach(model, provider) as handle:
        for seed in range(8):
            torch.manual_seed(seed)
            loss = output(model, batch).sum()
            before = handle.drop_rates()
            loss.backward()
            assert handle.drop_rates() == before
            seen.add(tuple(before.values()))
    assert len(seen) > 2


def test_a_pass_that_repeats_a_plain_one_is_refused():
    model, batch = BERT.build(), BERT.batch()

    def run(x, use_reentrant):
        return checkpoint(lambda x: output(model, batch) + 0 * x, x, use_reentrant=use_reentrant).sum()

    x = torch.zeros((), requires_grad=True)
    with attnreg.attach(model, attnreg.AttentionLayerDrop(1.0)) as handle:
        says = "AttentionLayerDrop cannot mask a forward pass that repeats one without gradients, because that one was not masked"
        with pytest.raises(RuntimeError, match=says):
            run(x, use_reentrant=True).backward()  # as cached losses do
        with handle.disabled():
            run(x, use_reentrant=True).backward()
        run(x, use_reentrant=False).backward()


def test_gradients_of_each_sample():
    model, ids = Layers(plain), torch.randint(1, 20, (3, 5))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, row):
        return functional_call(model, parameters, (row.unsqueeze(0),)).square().mean()

    per_sample = vmap(grad(loss), in_dims=(None, 0))
    expected = per_sample(parameters, ids)
    keep = torch.ones(5, 5, dtype=torch.bool)
    for mask in (attnreg.Mask(scores=keep), attnreg.Mask(scores=keep.tril())):
        with attnreg.attach(model, Answer(lambda site, mask=mask: mask), example_inputs=(ids,)) as handle:
            found = per_sample(parameters, ids)
            assert handle.drop_rates() == {}  # they cannot leave vmap
            assert handle.report().endswith("Drop rates are not measured within torch.func.")
            one = grad(loss)(parameters, ids[1])
        for name, gradient in found.items():
            assert torch.allclose(gradient[1], one[name], atol=1e-6)
    with attnreg.attach(model, Answer(lambda site: None), example_inputs=(ids,)):
        assert all(torch.equal(expected[name], g) for name, g in per_sample(parameters, ids).items())


def test_a_bias_of_torchs_own_is_a_mask_like_any_other():
    bias = causal_lower_right(5, 5)

    def causal(a, x, y):
        return F.scaled_dot_product_attention(*a.heads(x, y), attn_mask=bias)

    model, x = Attention(causal), torch.randn(2, 5, 16)
    with attnreg.attach(model, Answer(dropped), example_inputs=(x,)) as handle:
        out = model(x)
        assert [site.stack for site in handle.sites] == ["decoder"]
    means = split(model.v(x)).cumsum(2) / torch.arange(1, 6).view(1, 1, 5, 1)
    assert torch.allclose(out, means, atol=1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_within_an_attention_module(randomness):
    def one_by_one(a, x, y):
        def attend(q, k, v):
            return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]

        if not a.training:  # in the dry run
            return F.scaled_dot_product_attention(*a.heads(x, y))
        return vmap(attend, randomness=randomness)(*a.heads(x, y))

    model, x = Attention(one_by_one), torch.randn(1, 5, 16).repeat(3, 1, 1)
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x[:2],)):
        first, second, _ = model(x)
    assert torch.equal(first, second) is (randomness == "same")


def test_attention_on_several_processes_is_refused():
    def shared(a, x, y):
        q, k, v = a.heads(x, y)
        if mesh:
            q, k, v = (DTensor.from_local(each, mesh[0], [Shard(2)]) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    mesh, model, x = [], Attention(shared), torch.randn(2, 5, 16)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)):
            mesh.append(dist.init_device_mesh("cpu", (2,)))
            with pytest.raises(
                NoAttentionError, match=r"on several processes \(context, sequence or tensor parallelism"
            ):
                model(x)
    finally:
        dist.destroy_process_group()


def test_attaching_comes_before_wrapping():
    with pytest.raises(ValueError, match=r"The model is already wrapped in DataParallel\. Attach first, then wrap"):
        attnreg.attach(nn.DataParallel(BERT.build()), attnreg.AttentionDropout(0.1))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x, both=True):
        x = self.first(x)
        return self.second(x) if both else x


X = torch.randn(2, 4, 8)


def test_a_pass_within_a_pass_is_refused():
    model = Two()
    model.first.register_forward_pre_hook(lambda module, given: model.first.self_attn(X, X, X) and None)
    with (
        attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(X,)),
        pytest.raises(NoAttentionError, match=r"called more often .* do not call the model within its own forward"),
    ):
        model(X)


@pytest.mark.parametrize("once", [False, True])
def test_attention_that_never_runs_or_runs_no_more_is_said_once(once, patience):
    model = Two()
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(X,)):
        for number in range((1 + once) * patience - 1):
            model(X, both=once and number < patience)
        says = r"1 masked module\(s\) did not run in 12 training passes: second\.self_attn\."
        with pytest.warns(CoverageWarning, match=says):
            model(X, both=False)
        for _ in range(2 * patience + 1):
            model(X, both=False)


RECORDERS = {
    "jit": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, x: make_fx(model)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("record", RECORDERS.values(), ids=RECORDERS)
def test_a_recorded_pass_would_repeat_its_masks(record):
    model, x = nn.Sequential(Attention(fused)), torch.randn(3, 6, 16)
    with (
        attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)),
        pytest.raises(RuntimeError, match=r"torch\.jit\.trace, torch\.fx and CUDA graphs would repeat the masks"),
    ):
        record(model, x)


def test_a_step_notices_that_all_masked_blocks_are_gone():
    model = Two()
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(X,)) as handle:
        model.second(model.first(X))
        handle.step()
        model.first, model.second = Two().first, Two().second
        model.second(model.first(X))  # no masked module runs
        with pytest.raises(NoAttentionError, match="first was replaced after it was attached"):
            handle.step()


def test_seeds_are_drawn_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert new_seed(torch.Generator("cpu")).device.type == "cpu"
