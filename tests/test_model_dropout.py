"""The model's own dropout: which rates are set, that layers have them, and models without any."""

import json

import pytest
import transformers as hf
from torch import nn

from attnreg.experiments.tasks import get_task, load_model
from attnreg.experiments.tasks.models.dropout import dropout_fields, dropout_options
from tests.cases import tiny_bert
from tests.commands import assert_sentence, ran

TINY = ["--train-size", 32, "--epochs", 1, "--device", "cpu"]
SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
CONFIGS = {
    "bert": hf.BertConfig(**SMALL),
    "distilbert": hf.DistilBertConfig(vocab_size=64, n_layers=1, n_heads=2, dim=8, hidden_dim=8),
    "gpt2": hf.GPT2Config(vocab_size=64, n_layer=1, n_head=2, n_embd=8),
    "bart": hf.BartConfig(
        vocab_size=64, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8,
        decoder_attention_heads=2, decoder_ffn_dim=8, bos_token_id=0, pad_token_id=1, eos_token_id=2,
    ),
    "modernbert": hf.ModernBertConfig(**{**SMALL, "num_hidden_layers": 2}, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
}  # fmt: skip


def rates_in(model):
    """The rates of all dropout in a model: of its modules, and of attention that keeps a number only."""
    numbers = ("dropout", "attention_dropout", "activation_dropout", "dropout_prob")
    found = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    held = (getattr(module, name, None) for module in model.modules() for name in numbers)
    return {*found, *(value for value in held if isinstance(value, float))}


@pytest.mark.parametrize("family", CONFIGS)
def test_all_rates_of_all_layers_are_set(tmp_path, family):
    tiny_bert(["the boys sleep"], tmp_path)  # for its tokenizer
    hf.AutoModel.from_config(CONFIGS[family]).save_pretrained(tmp_path)
    task = get_task("agreement")
    before, _ = load_model(task, str(tmp_path))
    model, _ = load_model(task, str(tmp_path), dropout=0.37)
    assert rates_in(model) == {0.37}
    assert rates_in(before) != {0.37}
    changed = {k for k, v in model.config.to_dict().items() if before.config.to_dict().get(k) != v}
    assert changed == set(dropout_fields(before.config))


def test_a_run_says_which_rates_it_has_set_and_saves_them(cli, tmp_path):
    result = ran(cli("recipe", "finetune", *TINY, "--model-dropout", 0.25, "--output-dir", "out"))
    sentence = "--model-dropout 0.25 set attention_probs_dropout_prob, hidden_dropout_prob."
    assert sentence in result.stderr
    assert sentence in (tmp_path / "out" / "report.md").read_text()
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert (config["hidden_dropout_prob"], config["attention_probs_dropout_prob"]) == (0.25, 0.25)


def test_a_model_without_dropout_is_refused(cli):
    with pytest.raises(ValueError, match=r"Model llama .* has no dropout rate in its configuration: remove"):
        dropout_options(hf.PreTrainedConfig(), 0.1, "llama")
    assert dropout_options(hf.PreTrainedConfig(), None, "llama") == {}
    result = cli("recipe", "finetune", *TINY, "--model-dropout", 1)
    assert_sentence(result, 2, "Invalid value for '--model-dropout'")
