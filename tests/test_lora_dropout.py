"""LoRA Dropout and rank dropout against their formula, on peft's layers, and what they refuse."""

import copy

import peft
import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.training import FineTuning, LoRADropout
from tests.helpers import task_data as made
from tests.helpers.commands import assert_sentence, ran, read_lines
from tests.helpers.method_cases import bert, sgd
from tests.helpers.models import adapted
from tests.helpers.objectives import BATCH

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks
QUERY = "base_model.model.bert.encoder.layer.0.attention.self.query"


@torch.no_grad()
@pytest.mark.parametrize(("p", "ranks", "bias"), [(0.4, 0.0, False), (0.0, 0.5, False), (0.3, 0.25, True)])
def test_a_pass_is_the_formula_with_masks_of_its_own(p, ranks, bias, monkeypatch):
    model = adapted(lora_bias=bias)
    layer = model.get_submodule(QUERY)
    a, b = (getattr(layer, f"lora_{side}")["default"] for side in "AB")
    x, drawn = torch.randn(2, 3, 16, dtype=torch.float64), []
    LoRADropout(model, p, ranks)
    own = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *args, **options: (drawn.append(own(*args)), drawn[-1])[1])
    got = layer.train()(x)
    m_rank, m_in, m_out = (
        (next(of_size) if rate else torch.ones(size)) >= rate
        for of_size in [iter(drawn)]
        for rate, size in ((ranks, 4), (p, 16), (p, 16))
    )
    assert len(drawn) == (2 if p else 0) + (1 if ranks else 0)
    expected = layer.base_layer(x)
    for sample in range(2):
        for token in range(3):
            for o in range(16):
                total = float(b.bias[o]) if bias else 0.0
                for r in range(4):
                    inner = sum(float(a.weight[r, i] * m_in[i] * x[sample, token, i]) / (1 - p) for i in range(16))
                    total += float(b.weight[o, r] * m_out[o]) / (1 - p) * float(m_rank[r]) / (1 - ranks) * inner
                expected[sample, token, o] += 8 / 4 * total
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("argument", ["p", "ranks"])
def test_rates_by_pattern_are_those_of_the_first_that_matches(argument):
    model = adapted(r=16)
    patterns = {r"layer\.1\..*query": 0.75, "query": 0.25, r"0\.attention\.self\.(key|value)": 0.5}
    LoRADropout(model, **{"p": 0.0, argument: patterns})
    x = torch.eye(16, dtype=torch.float64)
    for layer, rates in ((0, {"query": 0.25, "value": 0.5}), (1, {"query": 0.75, "value": 0.0})):
        for name, rate in rates.items():
            a = model.get_submodule(QUERY.replace("0", str(layer)).replace("query", name)).lora_A["default"].train()
            passes = torch.stack([a(x).T for _ in range(400)])  # (passes, ranks, features)
            of_units = passes.ne(0).any(1 if argument == "p" else 2).double()
            assert abs(of_units.mean() - (1 - rate)) <= 5 * (rate * (1 - rate) / of_units.numel()) ** 0.5
            torch.testing.assert_close(passes, torch.where(passes == 0, 0.0, a.weight / (1 - rate)))


def test_evaluation_and_merging_are_those_of_the_plain_model():
    model = adapted()
    plain = model.eval()(**BATCH).logits
    LoRADropout(model, 0.5, 0.5)
    assert torch.equal(model(**BATCH).logits, plain)
    torch.testing.assert_close(copy.deepcopy(model).merge_and_unload().eval()(**BATCH).logits, plain)


def test_training_moves_the_adapters_that_it_drops_parts_of():
    model = adapted()
    dropout = LoRADropout(model, 0.5)
    before = {name: (a.weight.clone(), b.weight.clone()) for name, (a, b) in dropout.adapters.items()}
    FineTuning(model, sgd(model), attnreg.DropKey(0.1)).step(BATCH)
    assert len(before) == 4
    for name, pair in dropout.adapters.items():
        for dim, old, layer in zip((1, 0), before[name], pair, strict=True):
            moved = (old != layer.weight).any(1 - dim)
            assert 0.05 < moved.double().mean() < 0.95  # dropped features have no gradient


def moe():
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=20, num_key_value_heads=2, num_local_experts=2, **sizes))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)


@pytest.mark.parametrize(
    ("make", "rates", "says"),
    [
        (bert, {}, "BertForSequenceClassification has no LoRA adapter that trains"),
        (lambda: adapted(inference_mode=True), {}, "has no LoRA adapter that trains"),
        (lambda: adapted(use_dora=True), {}, "a variant of LoRA, such as DoRA"),
        (lambda: adapted(["query", "word_embeddings"]), {}, "an adapter of embeddings"),
        (lambda: adapted(["attention"], Attends()), {}, "an adapter of MultiheadAttention"),
        (lambda: adapted(["conv"], nn.ModuleDict({"conv": nn.Conv1d(2, 2, 1)})), {}, "an adapter of Conv1d"),
        (lambda: adapted([], moe(), target_parameters=["experts.down_proj"]), {}, "an adapter of ParamWrapper"),
        (lambda: (model := adapted(), model.merge_adapter())[0], {}, "merged into the weights"),
        (lambda: (model := adapted(), LoRADropout(model))[0], {}, "cannot replace the forward of base_model"),
        (adapted, {"p": 1.0}, "Expected `p`"),
        (adapted, {"p": -0.1}, "Expected `p`"),
        (adapted, {"ranks": 1.0}, "Expected `ranks`"),
        (adapted, {"ranks": "0.5"}, "Expected `ranks`"),
        (adapted, {"ranks": {"query": 0.1, "uery": 0.1}}, "Pattern 'uery' of `ranks` gives no adapter its rate: .* such as .*self.query, do"),
        (adapted, {"ranks": {"query": 0.1, "self.query": 0.1}}, "or an earlier pattern matches them"),
        (adapted, {"ranks": {"(query": 0.1}}, r"is no regular expression: missing \)"),
        (adapted, {"ranks": {"query": 1.0}}, r"Expected `ranks\['query'\]` to be a probability in \[0, 1\), got 1.0"),
    ],
)  # fmt: skip
def test_what_is_refused(make, rates, says):
    model = make()
    attributes = [sorted(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match=says):
        LoRADropout(model, **rates)
    assert [sorted(vars(module)) for module in model.modules()] == attributes


def test_a_recipe_trains_with_it(cli, tmp_path, undrawn):
    made.tiny_bert(tmp_path / "bert")
    made.write(tmp_path / "nli", train=16, validation=8)
    common = ["--task", "mnli", "--data-dir", tmp_path / "nli", "--model", tmp_path / "bert", "--epochs", 1]
    losses = []
    rates = ["--lora-matrix-dropout", 0.3, "--lora-rank-dropout", 0.5]
    for name, options in {"plain": [], "dropped": rates}.items():
        options = [*common, "--learning-rate", 0.05, "--lora-rank", 2, *options, "--output-dir", tmp_path / name]
        ran(cli("recipe", "finetune", *options))
        losses.append(read_lines(tmp_path / name / "metrics.jsonl")[-1]["loss"])
    assert losses[0] != losses[1]
    typed = "--lora-matrix-dropout 0.3 --lora-rank-dropout 0.5"
    assert typed in (tmp_path / "dropped/report.md").read_text()
    assert_sentence(
        cli("recipe", "finetune", *common, "--lora-rank-dropout", 0.5), 2, "--lora-rank-dropout needs --lora-rank"
    )


def test_a_seeded_model_repeats_what_it_drops():
    model = adapted(model=bert(dropout=0.2)).train()
    LoRADropout(model, 0.5, 0.25)
    handle = attnreg.seeded(model)
    inputs = {name: value for name, value in BATCH.items() if name != "labels"}
    whole = model(**inputs).logits
    assert not torch.allclose(model(**inputs).logits, whole)
    whole = model(**inputs).logits
    with handle.replay():
        assert torch.equal(model(**inputs).logits, whole)
    with handle.replay(handle.seed, torch.tensor([1, 2])), pytest.raises(ValueError, match="replay the whole batch"):
        model(**{name: value[1:] for name, value in inputs.items()})


@torch.no_grad()
def test_an_adapter_that_is_activated_later_is_dropped_from():
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["query"], init_lora_weights=False))
    model.double().train()
    LoRADropout(model, 0.5)
    x = torch.randn(1, 2, 16, dtype=torch.float64)
    for active, still in (("default", "other"), ("other", "default")):
        model.set_adapter(active)
        layers = {name: model.get_submodule(QUERY).lora_A[name] for name in (active, still)}
        assert not torch.equal(layers[active](x), layers[active](x))
        assert torch.equal(layers[still](x), layers[still](x))
