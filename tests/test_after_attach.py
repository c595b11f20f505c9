"""What changes in a model after attaching is noticed at the next pass: the pass is right, or refused."""

import copy
import functools
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

import attnreg
from attnreg.errors import NoAttentionError
from tests.helpers.cases import SMALL, TEXT
from tests.helpers.models import small

IDS = torch.arange(12).view(2, 6)


def rebind(attention):
    attention.forward = types.MethodType(type(attention).forward, attention)


ITS, HAS_FOUR = r"encoder\.layer\.1\.attention\.self was ", r"layer had 3 entries when it was attached, and has 4 now"
CHANGES = {
    # name: what happens to the blocks, what is said
    "forward": (lambda blocks: rebind(blocks[1].attention.self), ITS + "not masked, because its `forward` was replaced"),
    "attention": (lambda blocks: setattr(blocks[1].attention, "self", copy.deepcopy(blocks[1].attention.self)), ITS + "replaced"),
    "block": (lambda blocks: setattr(blocks, "1", small().encoder.layer[1]), r"layer\.1 was replaced after it was attached\. Call `handle\.detach\(\)`"),
    "a copy more": (lambda blocks: blocks.append(copy.deepcopy(blocks[1])), HAS_FOUR),
    "one more": (lambda blocks: blocks.append(small().encoder.layer[0]), HAS_FOUR),
    "one less": (lambda blocks: blocks.pop(2), r"encoder\.layer\.2 was replaced|encoder\.layer had 3 entries"),
}  # fmt: skip


def several_passes(model):
    for _ in range(20):  # until each block has not been skipped
        model(input_ids=IDS)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [attnreg.AttentionDropout, attnreg.HiddenDropout, attnreg.LayerDrop])
def test_a_part_that_is_replaced(change, make):
    model, provider = small(), make(0.5)
    handle = attnreg.attach(model, provider)
    replace, sentence = CHANGES[change]
    replace(model.encoder.layer)
    if change not in ("forward", "attention") or make is not attnreg.HiddenDropout:  # whose blocks are the same
        with pytest.raises(NoAttentionError, match=sentence):
            several_passes(model)
        with pytest.raises(NoAttentionError, match=sentence), handle.probing(), torch.no_grad():
            several_passes(model)
    with torch.no_grad():
        plain = model(input_ids=IDS)[0]
    with handle.disabled():
        assert torch.equal(model(input_ids=IDS)[0], plain)
    handle.detach()
    assert not attnreg.is_attached(model)
    assert torch.equal(model(input_ids=IDS)[0], plain)
    with attnreg.attach(model, provider) as handle:
        model(input_ids=IDS)
        assert len(handle.sites) >= len(model.encoder.layer)


def wrap_by_closure(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def wrap_by_partial(module):
    module.forward = functools.partial(module.forward)


def wrap_as_accelerate(module):
    module._old_forward = module.forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: self._old_forward(*args, **kwargs), module)


@pytest.mark.parametrize("wrap", [wrap_by_closure, wrap_by_partial, wrap_as_accelerate])
def test_a_forward_that_is_wrapped_is_masked(wrap):
    model = small()
    with attnreg.attach(model, attnreg.AttentionLayerDrop(1.0)) as handle:
        for module in list(model.modules()):
            wrap(module)
        model(input_ids=IDS)
        assert handle.drop_rates() == {f"encoder.{layer}": 1.0 for layer in range(3)}
        for layer in model.encoder.layer:
            layer.forward = types.MethodType(lambda self, x, *args, **kwargs: x, layer)  # skipped, as by LayerDrop
        if wrap is not wrap_by_closure:
            model(input_ids=IDS)


@pytest.mark.parametrize("make", [attnreg.AttentionDropout, attnreg.HiddenDropout, attnreg.LayerDrop])
def test_forwards_that_accelerate_restores_are_noticed(make):
    # As when peft loads an adapter for a model that is dispatched to the CPU.
    model = dispatch_model(small(), {"": "cpu"}, force_hooks=True)
    handle = attnreg.attach(model, make(0.5))
    several_passes(model)
    remove_hook_from_submodules(model)
    with pytest.raises(NoAttentionError, match="was not masked, because its `forward` was replaced"):
        model(input_ids=IDS)
    with torch.no_grad():
        plain = model(input_ids=IDS)[0]
    with pytest.raises(ValueError, match="You must specify"):
        model()  # so that the pass is not checked
    handle.detach()
    assert torch.equal(model(input_ids=IDS)[0], plain)
    assert not model._forward_hooks


PARALLEL = """
import sys
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import attnreg

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))

class Attention(nn.Module):
    def __init__(self, folded):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.folded = folded

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.folded:
            folded = [t.flatten(0, 1) for t in (q, k, v)]
            out = ((folded[0] @ folded[1].mT / 8**0.5).softmax(-1) @ folded[2]).view(q.shape)
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).flatten(-2))

for folded in (False, True):
    x, model = torch.randn(2, 6, 32), Attention(folded).train()
    handle = attnreg.attach(model, attnreg.HeadMask(1), example_inputs=(x,))
    parallelize_module(model, mesh, {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()})
    try:
        model(x)
    except attnreg.errors.NoAttentionError as error:
        print(error)
    handle.detach()
    model(x)
dist.destroy_process_group()
"""


def test_tensor_parallelism_is_refused(warm, tmp_path):
    code, output = warm.run("-c", PARALLEL, cwd=tmp_path, timeout=100, processes=2)
    assert code == 0, output
    assert output.count("Attention has 2 heads in this forward pass, but had 4 when it was attached") == 2
    assert output.count("Attention is split over several processes, and its samples and heads share a dimension") == 2


def llama(device="cpu", **options):
    with torch.device(device):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **SMALL, **options)).train()


def test_threads_share_a_model_in_eval_mode():
    model = small()
    handle = attnreg.attach(model, attnreg.DropHead(0.5) & attnreg.LayerDrop(0.5))
    model(input_ids=IDS)
    model.eval()
    with handle.disabled(), torch.no_grad():
        plain = model(input_ids=IDS).last_hidden_state
    with ThreadPoolExecutor(4) as threads:
        outputs = [*threads.map(lambda _: model(input_ids=IDS).last_hidden_state, range(40))]
    assert all(torch.equal(output, plain) for output in outputs)
    assert not torch.equal(model.train()(input_ids=IDS).last_hidden_state, plain)


def test_a_model_on_the_meta_device():
    model = llama("meta")
    with attnreg.attach(llama(), attnreg.DropKey(0.5)) as expected:
        sites = expected.sites
    handle = attnreg.attach(model, attnreg.DropKey(0.5))
    assert [vars(site) for site in handle.sites] == [vars(site) for site in sites]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.lm_head.weight.requires_grad
    torch.manual_seed(0)
    other = llama()
    model.load_state_dict(other.state_dict(), assign=True)
    model.model.rotary_emb = other.model.rotary_emb  # its buffers are in no state
    out, seed = model(input_ids=IDS).logits, handle.seed
    with attnreg.attach(other, attnreg.DropKey(0.5)) as handle, handle.replay(seed):
        assert torch.equal(other(input_ids=IDS).logits, out)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT + self.mask).softmax(-1) @ v


def test_a_mask_on_the_meta_device_is_unknown():
    with torch.device("meta"):
        model = Masked()
    with pytest.raises(NoAttentionError, match="buffer mask is on the meta device, and may be a mask"):
        attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(torch.randn(2, 6, 8),))


def test_layers_of_layers():
    model = small()
    nested = attnreg.OnLayers(attnreg.OnLayers(attnreg.AttentionLayerDrop(1.0), [1]), [1, 2])
    with attnreg.attach(model, nested) as handle:
        model(input_ids=IDS)
        assert handle.drop_rates() == {"encoder.0": 0.0, "encoder.1": 1.0, "encoder.2": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["block", "a copy more"])
def test_a_compiled_model_that_changes_is_refused_at_the_step_at_latest(change):
    model = small()
    compiled = torch.compile(model, backend="eager")
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.5))
    compiled(input_ids=IDS)
    handle.step()
    CHANGES[change][0](model.encoder.layer)
    with pytest.raises(NoAttentionError, match=r"Call `handle\.detach\(\)`, then `attach` again"):
        compiled(input_ids=IDS), handle.step()  # the pass itself refuses where torch compiles it anew
