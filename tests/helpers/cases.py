"""The rows of the test matrix: a row per tiny model; those per provider are in ``provider_cases.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version
from torch import nn

from tests.helpers.provider_cases import PROVIDERS, ProviderCase

TRANSFORMERS = Version(hf.__version__)
CACHE = "cache" if Version("5.24") <= TRANSFORMERS else "past_key_values"  # the argument of models that takes one
NEEDS_TORCH_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13")
TEXT = {"vocab_size": 40, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}


@dataclass(frozen=True)
class ModelCase:
    name: str
    make: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]]  # what gradient checkpointing wraps
    stacks: dict[str, int] = field(default_factory=lambda: {"encoder": 2})
    inputs: str = "ids"  # "ids", "pair" (source and target), "image", "vectors"
    shows_queries: bool = True  # to a provider; not if its attention is always written out
    eager: bool = True  # whether the same model can also run its attention written out, and show its weights

    def __str__(self) -> str:
        return self.name

    @property
    def takes_token_ids(self) -> bool:
        return self.inputs in ("ids", "pair")

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().train()
        for module in model.modules():
            if isinstance(module, hf.PreTrainedModel):
                module.config.use_cache = False  # a cache would grow when gradient checkpointing recomputes
        return model

    def batch(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        if self.inputs == "image":
            return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
        if self.inputs == "vectors":
            return {"src": torch.randn(3, 6, 16, generator=generator)}
        ids = torch.randint(2, 40, (3, 6), generator=generator)
        mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]])
        batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
        if self.inputs == "pair":
            batch["decoder_input_ids"] = torch.randint(2, 40, (3, 5), generator=generator)
        return batch


def output(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's main output."""
    result = model(**batch)
    return result if isinstance(result, torch.Tensor) else (result.logits if "logits" in result else result[0])


def shown_attentions(case: ModelCase, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The attention weights that a model shows, by stack."""
    model.set_attn_implementation("eager")
    result = model(**batch, output_attentions=True)
    if len(case.stacks) == 1:
        return dict.fromkeys(case.stacks, result["attentions"])
    return {stack: result[f"{stack}_attentions"] for stack in case.stacks}


def bert_in_float64(head: type = hf.BertForSequenceClassification, **options: Any) -> Any:
    """A tiny model whose attention is far from uniform, a classifier unless another head is given."""
    torch.manual_seed(0)
    return head(hf.BertConfig(**{**TEXT, **SMALL, "initializer_range": 0.4, **options})).double()


def _classifier(config: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = config(**{**TEXT, **SMALL, **options})
        return hf.AutoModelForSequenceClassification.from_config(made)

    return make


def _bert_blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.base_model.encoder.layer)


def _seq2seq_blocks(model: nn.Module) -> list[nn.Module]:
    return [*model.model.encoder.layers, *model.model.decoder.layers]


SEQ2SEQ = {
    "vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 0,
    "forced_eos_token_id": 1, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip
PAIR_STACKS = {"encoder": 2, "decoder": 2, "cross": 2}

MODELS = [
    ModelCase("bert", _classifier(hf.BertConfig), _bert_blocks),
    ModelCase("roberta", _classifier(hf.RobertaConfig, max_position_embeddings=32), _bert_blocks),
    ModelCase("electra", _classifier(hf.ElectraConfig, embedding_size=8), _bert_blocks),
    ModelCase("albert", _classifier(hf.AlbertConfig, embedding_size=8), lambda m: list(m.albert.encoder.albert_layer_groups)),
    ModelCase(
        "distilbert",
        lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**TEXT, dim=16, n_layers=2, n_heads=4, hidden_dim=24)),
        lambda m: list(m.distilbert.transformer.layer),
    ),
    ModelCase(
        "deberta-v2",
        _classifier(hf.DebertaV2Config, relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False, max_position_embeddings=32),
        _bert_blocks,
        shows_queries=False,
        eager=False,
    ),
    ModelCase(
        "modernbert",
        _classifier(hf.ModernBertConfig, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3, local_attention=4, global_attn_every_n_layers=2),
        lambda m: list(m.model.layers),
    ),
    ModelCase("marian", lambda: hf.MarianMTModel(hf.MarianConfig(**SEQ2SEQ)), _seq2seq_blocks, stacks=PAIR_STACKS, inputs="pair"),
    ModelCase("bart", lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)), _seq2seq_blocks, stacks=PAIR_STACKS, inputs="pair"),
    ModelCase(
        "t5",
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0)),
        lambda m: [*m.encoder.block, *m.decoder.block],
        stacks=PAIR_STACKS,
        inputs="pair",
    ),
    ModelCase(
        "gpt2",
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=3)),
        lambda m: list(m.transformer.h),
        stacks={"decoder": 2},
    ),
    ModelCase(
        "llama",
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **SMALL, num_key_value_heads=2, bos_token_id=2, eos_token_id=3)),
        lambda m: list(m.model.layers),
        stacks={"decoder": 2},
    ),
    ModelCase(
        "vit",
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**SMALL, image_size=8, patch_size=4)),
        lambda m: list(m.vit.layers if hasattr(m.vit, "layers") else m.vit.encoder.layer),
        inputs="image",
    ),
    ModelCase(
        "torch-encoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2, enable_nested_tensor=False),
        lambda m: list(m.layers),
        inputs="vectors",
        eager=False,
    ),
]  # fmt: skip

BERT = MODELS[0]


def model_case(name: str) -> ModelCase:
    return next(case for case in MODELS if case.name == name)


def refusal(model: ModelCase, provider: ProviderCase) -> str | None:
    """What a provider says to a model that it cannot be attached to."""
    if provider.needs_token_ids and not model.takes_token_ids:
        return "takes no token ids"
    if provider.needs_queries and not model.shows_queries:
        return "needs queries, but .* exposes only its scores"
    return None


# Between them: queries that are seen, two stacks and a bias, torch's own modules.
FEW = ("bert", "t5", "torch-encoder")
# Tried on every model in every run: masks on weights; on scores, from tokens and from a first pass. Whole blocks are in
# tests/test_layerdrop.py.
COMMON = ("weights-dropout", "g-net", "ad-drop")
RARE = ("weights-dropout", "g-net")  # of which some tests take the first model alone


def pairs(
    wanted: Callable[[ProviderCase], bool] = lambda provider: True, *, refused: bool = False, on_few: bool = False
) -> list[Any]:
    """Rows of the matrix. Every run tries all providers on the first model, and common ones on all (``on_few``: one of
    them on few, and variants of a provider on none).

    The others are slow tests.
    """

    def is_slow(model: ModelCase, provider: ProviderCase) -> bool:
        if model is MODELS[0]:
            return on_few and provider.variant
        if provider.name in COMMON:
            return on_few and (model.name not in FEW or provider.name in RARE)
        return True

    return [
        pytest.param(m, p, marks=[pytest.mark.slow] if is_slow(m, p) else [])
        for m in MODELS
        for p in PROVIDERS
        if (refusal(m, p) is not None) == refused and wanted(p)
    ]


def sample(rows: Iterable[Any], usual: Callable[..., bool]) -> list[Any]:
    """Rows of a table of which every run tries the usual ones; the others are slow tests."""
    spread = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=[] if usual(*row) else pytest.mark.slow) for row in spread]


def keep_few_activations(model: Any, options: dict[str, Any]) -> None:
    """Turn on gradient checkpointing, by the name that it has in this version of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def tiny_bert(texts: list[str], folder: Path) -> None:
    """Save a tiny random BERT with a word vocabulary of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=500, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    config = hf.BertConfig(**{**SMALL, "vocab_size": 500, "num_attention_heads": 2, "intermediate_size": 16})
    hf.BertForSequenceClassification(config).save_pretrained(folder)


def refused(*rows, error=ValueError):
    """A test of calls that raise an error: each row is a function without arguments, and what it says."""

    @pytest.mark.parametrize(("make", "sentence"), rows)
    def test(make, sentence):
        with pytest.raises(error, match=sentence):
            make()

    return test
