"""Models that are not Hugging Face's: those of x-transformers, under the same checks."""

import pytest
import torch

from attnreg.injection import NoAttentionError, discover
from tests.sweep.checks import CHECKS
from tests.sweep.trace import no_trace

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
xt = pytest.importorskip("x_transformers", reason="needs x-transformers")

SIZE = {"dim": 32, "depth": 2, "heads": 4}
IDS = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(7) < torch.tensor([[7], [5]])


def wrapped(layers, **options):
    return xt.TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers, **options)


def pair():
    sizes = {"num_tokens": 100, "depth": 2, "heads": 4, "max_seq_len": 64}
    given = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    return xt.XTransformer(dim=32, **given)


DECODERS = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "grouped": {"attn_kv_heads": 2},
    "normalized": {"attn_qk_norm": True},
    "sparse": {"attn_sparse_topk": 3},
    "sink": {"attn_add_zero_kv": True},
    "gated": {"attn_gate_values": True},
}
ENCODERS = {
    "plain": {},
    "flash": {"attn_flash": True},
    "relative": {"rel_pos_bias": True},
    "talking": {"attn_pre_talking_heads": True},
    "memory": {"attn_num_mem_kv": 4},
}


def cases():
    for name, options in DECODERS.items():
        yield f"decoder-{name}", wrapped(xt.Decoder(**SIZE, **options)), {"x": IDS}, ["decoder"] * 2
    for name, options in ENCODERS.items():
        yield f"encoder-{name}", wrapped(xt.Encoder(**SIZE, **options)), {"x": IDS, "mask": MASK}, ["encoder"] * 2
    yield "memory-tokens", wrapped(xt.Encoder(**SIZE), num_memory_tokens=3), {"x": IDS}, ["encoder"] * 2
    # Both sides of one length: cross-attention is told from self-attention all the same.
    yield "pair", pair(), {"src": IDS, "tgt": IDS}, ["encoder"] * 2 + ["decoder", "cross"] * 2
    image = xt.ViTransformerWrapper(image_size=32, patch_size=8, attn_layers=xt.Encoder(**SIZE))
    yield "image", image, {"img": torch.randn(2, 3, 32, 32)}, ["encoder"] * 2


@pytest.mark.parametrize(("model", "inputs", "stacks"), [pytest.param(*case, id=name) for name, *case in cases()])
def test_it_is_right(model, inputs, stacks):
    found = discover(model, inputs)
    assert [site.info.stack for site in found.sites] == stacks
    assert {site.info.heads for site in found.sites} == {4}
    assert not found.left_out
    for check in (*CHECKS.values(), no_trace):
        check(model, inputs, {"example_inputs": inputs})


def test_what_is_no_softmax_is_refused():
    with pytest.raises(
        NoAttentionError, match="its weights come from a function that cannot be masked, such as log_softmax"
    ):
        discover(wrapped(xt.Decoder(**SIZE, attn_sigmoid=True)), {"x": IDS})
