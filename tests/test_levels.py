"""Levels of models: learning rates that fall with depth, and top blocks that start anew."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.injection import NoAttentionError
from attnreg.training import adamw, reinitialize_top
from attnreg.training.levels import blocks_of, levels_of
from tests.helpers.cases import MODELS, SMALL, TEXT
from tests.helpers.commands import ran, read_lines
from tests.helpers.method_cases import bert

ONE_STACK = [case for case in MODELS if case.stacks in ({"encoder": 2}, {"decoder": 2}) and case.name != "albert"]
OTHERS = {"albert": "runs more than once", "t5": "in 2 lists, encoder.block, decoder.block", "bart": "in 2 lists", "marian": "in 2 lists"}  # fmt: skip


@pytest.mark.parametrize("case", ONE_STACK, ids=str)
def test_blocks_are_those_of_the_model_and_every_parameter_has_one_level(case):
    model = case.build()
    random, keys = torch.get_rng_state(), list(model.state_dict())
    blocks = blocks_of(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert list(model.state_dict()) == keys
    assert [*map(id, blocks)] == [*map(id, case.blocks(model))]
    levels = levels_of(model)
    assert sorted(id(p) for level in levels for p in level) == sorted(id(p) for p in model.parameters())
    for block, level in zip(blocks, levels[1:-1], strict=True):
        assert {id(p) for p in block.parameters()} == {id(p) for p in level}
    if case.takes_token_ids:
        assert any(p is model.get_input_embeddings().weight for p in levels[0])


@pytest.mark.parametrize("case", [case for case in MODELS if case not in ONE_STACK], ids=str)
def test_what_has_no_single_order_is_refused(case):
    model, says = case.build(), f"have no single order from bottom to top, because .*{OTHERS[case.name]}"
    for refused in (levels_of, lambda model: reinitialize_top(model, 1), lambda model: adamw(model, 1e-3, layerwise_decay=0.9)):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            refused(model)


def test_blocks_in_pieces_and_models_without_any_are_refused():
    xlm = hf.XLMForSequenceClassification(hf.XLMConfig(vocab_size=40, emb_dim=16, n_layers=2, n_heads=2))
    with pytest.raises(ValueError, match=r"attentions\.0 is in no list of blocks"):
        blocks_of(xlm)
    with pytest.raises(NoAttentionError):
        blocks_of(nn.Linear(2, 2))


def names_of(model):
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in level} for level in levels_of(model)]


def test_what_is_below_and_what_is_above():
    config = hf.OPTConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=16, word_embed_proj_dim=16)  # fmt: skip
    below, *_, above = names_of(hf.OPTForCausalLM(config))  # its final norm is declared before its blocks
    assert {name.split(".")[2] for name in below} == {"embed_tokens", "embed_positions"}
    assert {name.split(".")[2] for name in above} == {"final_layer_norm"}
    options = {"relative_attention": True, "pos_att_type": ["p2c"], "max_position_embeddings": 32}
    config = hf.DebertaV2Config(**TEXT, **SMALL, **options, position_biased_input=False, norm_rel_ebd="layer_norm")
    below, *_, above = names_of(hf.DebertaV2ForSequenceClassification(config))
    assert "deberta.encoder.rel_embeddings.weight" in below
    assert {name.split(".")[0] for name in above} == {"pooler", "classifier"}
    below, *_, above = names_of(bert())
    assert {name.split(".")[1] for name in below} == {"embeddings"}
    assert {name.split(".")[-2] for name in above} == {"dense", "classifier"}  # the pooler and the head


def test_rates_fall_from_block_to_block():
    model = bert()
    optimizer = adamw(model, 0.1, weight_decay=0.3, layerwise_decay=0.5)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert found.keys() == {id(p) for p in model.parameters()}
    for path, parameter in model.named_parameters():
        exponent = 2 if ".embeddings." in path else 1 if ".layer.0." in path else 0
        assert found[id(parameter)] == (pytest.approx(0.1 * 0.5**exponent), 0.3 if parameter.dim() > 1 else 0.0), path


def test_frozen_weights_are_left_out_and_without_decay_groups_are_as_ever():
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    optimizer = adamw(model, 0.1, layerwise_decay=0.5)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    assert all(group["params"] for group in optimizer.param_groups)
    assert [group["lr"] for group in adamw(model, 0.1).param_groups] == [0.1, 0.1]
    for wrong in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="Expected `layerwise_decay`"):
            adamw(model, 0.1, layerwise_decay=wrong)


def test_an_attached_model_has_the_same_levels():
    model = bert()
    expected = names_of(model)
    with attnreg.attach(model, attnreg.AttentionDropout(0.3) & attnreg.LayerDrop(0.5)):
        assert names_of(model.train()) == expected


@pytest.mark.parametrize("case", [case for case in ONE_STACK if case.name != "torch-encoder"], ids=str)
def test_the_top_block_of_a_loaded_model_starts_anew(case, tmp_path):
    case.build().save_pretrained(tmp_path)
    model = type(case.build()).from_pretrained(tmp_path)  # transformers would not initialize its weights again
    before = copy.deepcopy(model.state_dict())
    changed = reinitialize_top(model, 1)
    top = case.blocks(model)[-1]
    assert model.get_submodule(changed[0]) is top
    assert len(changed) == 1 + (getattr(model.base_model, "pooler", None) is not None)
    for name, value in model.state_dict().items():
        inside = any(name.startswith(f"{part}.") for part in changed)
        if not inside:
            assert torch.equal(value, before[name]), name
        elif value.dim() > 1 and not name.endswith("inv_freq"):
            assert not torch.equal(value, before[name]), name


def test_new_values_are_those_of_a_new_model():
    torch.manual_seed(0)
    config = hf.BertConfig(vocab_size=20, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, initializer_range=0.05)  # fmt: skip
    model = hf.BertForSequenceClassification(config)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    assert reinitialize_top(model, 2) == ["bert.encoder.layer.1", "bert.encoder.layer.2", "bert.pooler"]
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("layer.1.", "layer.2.", "pooler")):
            assert (parameter == 7.0).all()
        elif "LayerNorm.weight" in name:
            assert (parameter == 1.0).all()
        elif name.endswith("bias"):
            assert (parameter == 0.0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=5 / parameter.numel() ** 0.5)
            assert abs(parameter.mean().item()) < 5 * 0.05 / parameter.numel() ** 0.5


def test_what_cannot_start_anew_is_refused_and_unchanged():
    model, faulty = bert(), bert()
    pooler = faulty.bert.pooler.dense
    faulty._init_weights = lambda module: nn.init.zeros_(pooler.weight) if module is pooler else None
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    for refused, layers, says in (
        (model, 3, "has 2 blocks, too few to re-initialize 3"),
        (model, 0, "Expected `layers` to be at least 1"),
        (faulty, 1, r"does not initialize bert\.encoder\.layer\.1\."),
        (plain, 1, "TransformerEncoder has no `_init_weights`"),
    ):
        before = copy.deepcopy(refused.state_dict())
        with pytest.raises(ValueError, match=says):
            reinitialize_top(refused, layers)
        assert all(torch.equal(value, before[name]) for name, value in refused.state_dict().items())


TINY = ["--train-size", 32, "--batch-size", 8, "--epochs", 1, "--device", "cpu"]


def test_a_run_with_both_options_is_the_recipe_few_sample(cli, tmp_path):
    args = ["--layerwise-decay", 0.95, "--reinit-layers", 2]
    result = ran(cli("recipe", "finetune", *TINY, *args, "--output-dir", "a"))
    assert "--reinit-layers re-initialized bert.encoder.layer.1, bert.encoder.layer.2, bert.pooler." in result.output
    ran(cli("recipe", "few-sample", *TINY, "--output-dir", "b"))
    ran(cli("recipe", "finetune", *TINY, "--output-dir", "c"))
    a, b, c = (read_lines(tmp_path / name / "metrics.jsonl") for name in "abc")
    assert a == b
    assert a != c
