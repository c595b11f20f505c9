"""The rows of the tests of the model's own randomness: tiny models that draw in every way, and passes of them."""

from dataclasses import dataclass

import peft
import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from tests.helpers.cases import SEQ2SEQ, keep_few_activations

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": 40, "pad_token_id": 0, **SMALL}
T5 = {
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 4}
SOUND = {
    **SMALL, "vocab_size": 8, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
}  # fmt: skip
SEED = 11


def llama_with_lora(**options):
    config = hf.LlamaConfig(**TEXT, num_key_value_heads=1, attention_dropout=0.2)
    model = hf.LlamaForCausalLM._from_config(config, **options)
    adapter = peft.LoraConfig(r=2, lora_dropout=0.3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, adapter)


def classifier(config, **given):
    def make(**options):
        return hf.AutoModelForSequenceClassification.from_config(config(**{**TEXT, **given}), **options)

    return make


def made(model, config, **given):
    return lambda **options: model._from_config(config(**given), **options)


@dataclass(frozen=True)
class Family:
    make: object
    kernels: tuple = ("eager", "sdpa")
    inputs: str = "ids"
    rows: bool = True  # whether the samples of all random tensors are known
    checkpoints: bool = True


FAMILIES = {
    "bert": Family(classifier(hf.BertConfig)),
    "roberta": Family(classifier(hf.RobertaConfig, max_position_embeddings=32)),
    "deberta": Family(
        classifier(hf.DebertaV2Config, relative_attention=True, pos_att_type=["p2c", "c2p"], max_position_embeddings=32),
        ("eager",),
    ),
    "t5": Family(made(hf.T5ForConditionalGeneration, hf.T5Config, **T5), inputs="pair"),
    "bart": Family(
        made(hf.BartForConditionalGeneration, hf.BartConfig, **SEQ2SEQ, encoder_layerdrop=0.3, decoder_layerdrop=0.3, attention_dropout=0.2),
        inputs="pair",
    ),
    "gpt2": Family(made(hf.GPT2LMHeadModel, hf.GPT2Config, vocab_size=40, n_embd=16, n_layer=2, n_head=2)),
    "opt": Family(  # joins samples and tokens
        made(hf.OPTForCausalLM, hf.OPTConfig, vocab_size=40, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24,
             num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32, dropout=0.2)
    ),
    "llama with lora": Family(llama_with_lora),
    "beit": Family(
        made(hf.BeitForImageClassification, hf.BeitConfig, **IMAGE, drop_path_rate=0.5, hidden_dropout_prob=0.2),
        inputs="image",
    ),
    "switch": Family(
        made(hf.SwitchTransformersForConditionalGeneration, hf.SwitchTransformersConfig, **T5, num_sparse_encoder_layers=1,
             num_decoder_layers=2, num_sparse_decoder_layers=1, num_experts=2, router_jitter_noise=0.3),
        ("eager",), inputs="pair", rows=False, checkpoints=False,
    ),
    "wav2vec2": Family(
        made(hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config, **SOUND, layerdrop=0.3, apply_spec_augment=False), inputs="sound"
    ),
    "torch": Family(
        lambda **o: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, 0.2, batch_first=True), 2), ("",),
        inputs="vectors", checkpoints=False,
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("family", FAMILIES)


class Drawing(nn.Module):
    """Draws by a function in training mode."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x) if self.training else x


def build(family, kernel=None):
    torch.manual_seed(0)
    row = FAMILIES[family]
    kernel = kernel or row.kernels[-1]
    model = row.make(**({"attn_implementation": kernel} if kernel else {})).train()
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model


def batch_of(family, size=8):
    generator = torch.Generator().manual_seed(1)
    inputs = FAMILIES[family].inputs
    if inputs == "image":
        return {"pixel_values": torch.randn(size, 3, 8, 8, generator=generator)}
    if inputs == "sound":
        return {"input_values": torch.randn(size, 80, generator=generator)}
    if inputs == "vectors":
        return {"src": torch.randn(size, 6, 16, generator=generator)}
    ids = torch.randint(2, 40, (size, 6), generator=generator)
    lengths = torch.tensor([6, 4, 5, 6, 3, 6, 2, 5])[:size]
    mask = (torch.arange(6) < lengths[:, None]).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    if inputs == "pair":
        batch["decoder_input_ids"] = torch.randint(2, 40, (size, 5), generator=generator)
    return batch


def outputs(model, batch):
    result = model(**batch)
    return result if isinstance(result, torch.Tensor) else result.logits


def pass_of(family, kernel=None, options=None):
    """The outputs and gradients of a pass of one seed, with options of gradient checkpointing."""
    model = build(family, kernel)
    handle = attnreg.seeded(model)
    if options is not None:
        keep_few_activations(model, options)
        model.enable_input_require_grads()
    with handle.replay(SEED):
        out = outputs(model, batch_of(family))
    out.square().sum().backward()
    handle.detach()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(a, b):
    assert len(a[1]) == len(b[1]) > 0
    for x, y in zip((a[0], *a[1]), (b[0], *b[1]), strict=True):
        assert float((x - y).abs().max()) <= 1e-5 * float(y.abs().max()) + 1e-6


OPTIONS = [
    {"use_reentrant": reentrant, "preserve_rng_state": preserve}
    for reentrant in (True, False)
    for preserve in (True, False)
]

MASKED = [
    "DropKey(0.4)",
    "DropKey(0.4, share_queries=True)",
    "AttentionDropout(0.3) & HiddenDropout(0.3)",
    "DropAttention(0.3)",
]


def seeded(model, text):
    if text is None:
        return attnreg.seeded(model)
    return attnreg.attach(model, attnreg.parse_provider(text, model), own_dropout="seeded")


def check_the_side_of_padding(family, kernel, text):
    model, ids = build(family, kernel), torch.randint(2, 40, (3, 6), generator=torch.Generator().manual_seed(1))
    for module in model.modules():
        if kernel == "flex_attention" and hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # the kernel has none
    handle, found = seeded(model, text), []
    lengths = torch.tensor([6, 4, 3])
    mask = (torch.arange(6) < lengths[:, None]).long()
    for left in (False, True):
        order = torch.stack([torch.arange(6).roll(6 - n) if left else torch.arange(6) for n in lengths.tolist()])
        given = {name: value.gather(1, order) for name, value in {"input_ids": ids, "attention_mask": mask}.items()}
        positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with handle.replay(SEED):
            logits = model(**given, position_ids=positions).logits
        found.append([row[kept.bool()] for row, kept in zip(logits, given["attention_mask"], strict=True)])
    for right, left in zip(*found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-5)
    with handle.replay(SEED + 1):
        other = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    assert not torch.allclose(other[0], found[0][0], atol=1e-3)
