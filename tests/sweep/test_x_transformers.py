"""Models that are not Hugging Face's: those of x-transformers, under the same checks."""

import pytest
import torch

from attnreg.injection import NoAttentionError, discover
from tests.sweep.checks import CHECKS
from tests.sweep.trace import no_trace

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZE = {"dim": 32, "depth": 2, "heads": 4}
IDS = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(7) < torch.tensor([[7], [5]])


@pytest.fixture(scope="module")
def xt():
    return pytest.importorskip("x_transformers", reason="needs x-transformers")


def wrapped(xt, layers, **options):
    return xt.TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers, **options)


def pair(xt):
    sizes = {"num_tokens": 100, "depth": 2, "heads": 4, "max_seq_len": 64}
    given = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    return xt.XTransformer(dim=32, **given)


DECODERS = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "data-dependent-alibi": {"attn_data_dependent_alibi": True},
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
    "data-dependent-alibi": {"attn_data_dependent_alibi": True},
}


def decoder(options):
    return lambda xt: (wrapped(xt, xt.Decoder(**SIZE, **options)), {"x": IDS})


def encoder(options, **more):
    mask = {} if more else {"mask": MASK}
    return lambda xt: (wrapped(xt, xt.Encoder(**SIZE, **options), **more), {"x": IDS, **mask})


def image(xt):
    model = xt.ViTransformerWrapper(image_size=32, patch_size=8, attn_layers=xt.Encoder(**SIZE))
    return model, {"img": torch.randn(2, 3, 32, 32)}


CASES = {
    **{f"decoder-{name}": (decoder(options), ["decoder"] * 2) for name, options in DECODERS.items()},
    **{f"encoder-{name}": (encoder(options), ["encoder"] * 2) for name, options in ENCODERS.items()},
    "memory-tokens": (encoder({}, num_memory_tokens=3), ["encoder"] * 2),
    # Both sides of one length: cross-attention is told from self-attention all the same.
    "pair": (lambda xt: (pair(xt), {"src": IDS, "tgt": IDS}), ["encoder"] * 2 + ["decoder", "cross"] * 2),
    "image": (image, ["encoder"] * 2),
}


@pytest.mark.parametrize(("make", "stacks"), CASES.values(), ids=CASES)
def test_it_is_right(xt, make, stacks):
    model, inputs = make(xt)
    found = discover(model, inputs)
    assert [site.info.stack for site in found.sites] == stacks
    assert {site.info.heads for site in found.sites} == {4}
    assert not found.left_out
    for check in (*CHECKS.values(), no_trace):
        check(model, inputs, {"example_inputs": inputs})


def test_what_is_no_softmax_is_refused(xt):
    with pytest.raises(
        NoAttentionError, match="its weights come from a function that cannot be masked, such as log_softmax"
    ):
        discover(wrapped(xt, xt.Decoder(**SIZE, attn_sigmoid=True)), {"x": IDS})
