"""What transformers fills in without a word when a model is loaded: tokenizers, weights, names of classes."""

import json
import re

import pytest
import torch
import transformers as hf
from packaging.version import Version
from safetensors.torch import load as read
from safetensors.torch import load_file, save, save_file
from torch import nn

from attnreg.errors import AttnRegWarning, InputError
from attnreg.experiments.tasks import choose_task, get_task, load_model
from attnreg.experiments.tasks.models.pretrained import dropout_options, load_pretrained, weight_warnings
from tests.helpers import task_data as made
from tests.helpers.cases import TRANSFORMERS, tiny_bert
from tests.helpers.commands import assert_sentence, ran

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
BERT, ROBERTA = hf.BertConfig(**SIZES), hf.RobertaConfig(**SIZES)
GPT2 = hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)
LLAMA = hf.LlamaConfig(**SIZES, tie_word_embeddings=False)
T5 = hf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
# Older versions load no image models.
IMAGE_MODELS = (hf.ViTModel, hf.ViTForMaskedImageModeling) if Version("5.20") <= TRANSFORMERS else ()
WORDLESS = {name: SIZES[name] for name in SIZES if name != "vocab_size"}
VIT = hf.ViTConfig(image_size=8, patch_size=4, **WORDLESS)
QUICK = ["--task", "mnli", "--data-dir", "nli", "--epochs", 1, "--max-length", 32, "--device", "cpu"]


def classifier(name="SequenceClassification"):
    return getattr(hf, f"AutoModelFor{name}")


def said(source, auto, folder, head_is_new=True):
    """The warnings of loading what was saved from a model with another head, and those of weights."""
    source.save_pretrained(folder)
    model, info = auto.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    found = weight_warnings(model, info, "it", head_is_new=head_is_new)
    return [sentence.removeprefix("--model it ") for sentence in found]


# --- tokenizers and image processors


@pytest.mark.parametrize("config", [BERT, ROBERTA, T5, LLAMA, hf.MPNetConfig(**SIZES)], ids=lambda each: each.model_type)  # fmt: skip
def test_a_folder_without_a_tokenizer_is_refused(config, tmp_path):
    hf.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    says = f"^Cannot load the tokenizer of --model {tmp_path} .* Save the model's own tokenizer, such as tokenizer.json"
    with pytest.raises(InputError, match=says):
        load_model(get_task("rte"), str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match=says):
        load_model(get_task("rte"), str(tmp_path))


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("model.safetensors", lambda old: old[:-100], r"^Cannot load --model .*: its weights are damaged \(.*\)$"),
        ("model.safetensors", lambda old: save({f"module.{name}": value for name, value in read(old).items()}),
         r"No pretrained weight .* other names or sizes, such as module\.embeddings"),
        ("tokenizer.json", lambda old: b'{"model": {"type": "none"}}', "^Cannot load the tokenizer of --model /"),
    ],
    ids=["cut weights", "no weight that fits", "broken tokenizer"],
)  # fmt: skip
def test_damaged_files_end_in_a_sentence(tmp_path, file, damage, says):
    path = made.tiny_bert(tmp_path) / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=says):
        load_model(get_task("rte"), str(tmp_path))


@pytest.mark.slow
def test_tokenizers_of_bytes_and_characters_need_no_vocabulary(tmp_path):
    canine = hf.CanineModel(hf.CanineConfig(**WORDLESS, num_hash_buckets=16))
    made.save(tmp_path / "canine", canine, hf.CanineTokenizer())
    byt5 = hf.T5Config(**{**T5.to_dict(), "vocab_size": 384, "decoder_start_token_id": 0})
    made.save(tmp_path / "byt5", hf.T5ForConditionalGeneration(byt5), hf.ByT5Tokenizer())
    for name in ("canine", "byt5"):
        assert not list((tmp_path / name).glob("vocab*")) + list((tmp_path / name).glob("tokenizer.json"))
        model, tokenizer = load_model(get_task("rte"), str(tmp_path / name))
        assert model(**tokenizer("né", "seven", return_tensors="pt")).logits.shape == (1, 2)


@pytest.mark.skipif(Version("5.20") > TRANSFORMERS, reason="older versions need torchvision for images")
def test_a_folder_without_an_image_processor_is_refused(tmp_path):
    hf.ViTModel(VIT).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"Cannot load the image processor of .* such as preprocessor_config\.json"):
        load_model(choose_task("custom", kind="image-classification"), str(tmp_path))


# --- weights


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *((hf.BertModel(BERT), name) for name in ("SequenceClassification", "TokenClassification", "MultipleChoice")),
        *((hf.BertForPreTraining(BERT), name) for name in ("SequenceClassification", "QuestionAnswering", "MaskedLM")),
        *((hf.RobertaModel(ROBERTA), name) for name in ("SequenceClassification", "TokenClassification")),
        (hf.RobertaForMaskedLM(ROBERTA), "SequenceClassification"),
        (hf.BertForMaskedLM(BERT), "TokenClassification"),
        *((hf.GPT2LMHeadModel(GPT2), name) for name in ("SequenceClassification", "CausalLM")),
        (hf.LlamaForCausalLM(LLAMA), "SequenceClassification"),
        *((hf.T5ForConditionalGeneration(T5), name) for name in ("SequenceClassification", "Seq2SeqLM")),
        (hf.DistilBertForMaskedLM(hf.DistilBertConfig(dim=16, n_heads=2, hidden_dim=16)), "SequenceClassification"),
        (hf.ElectraForPreTraining(hf.ElectraConfig(**SIZES)), "SequenceClassification"),
        (hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**SIZES)), "SequenceClassification"),
        *((each(VIT), "ImageClassification") for each in IMAGE_MODELS),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_usual_checkpoints_give_no_warning(source, name, tmp_path):
    assert said(source, classifier(name), tmp_path) == []


def test_buffers_of_older_versions_give_no_warning(tmp_path):
    hf.GPT2Model(GPT2).save_pretrained(tmp_path)
    older = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.ones(1)}
    edit(tmp_path, lambda weights: {**weights, **older})
    model, info = classifier().from_pretrained(tmp_path, output_loading_info=True)
    assert weight_warnings(model, info, "it") == []


def edit(folder, change):
    path = folder / "model.safetensors"
    weights = change(load_file(path))
    save_file(weights, path, metadata={"format": "pt"})


def configure(folder, **options):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


NEW = "lacks pretrained weights of the right size, which are newly initialized:"


def test_weights_that_are_missing(tmp_path):
    assert said(hf.BertForMaskedLM(BERT), classifier(), tmp_path / "pooler") == [f"{NEW} bert.pooler.dense."]
    (decoder,) = said(hf.T5EncoderModel(T5), classifier("Seq2SeqLM"), tmp_path / "t5", head_is_new=False)
    assert re.match(rf"{NEW} decoder\.block\.0\.layer\.0\.Self.* more\.$", decoder)
    assert said(hf.LlamaModel(LLAMA), classifier("CausalLM"), tmp_path / "head", head_is_new=False) == [
        f"{NEW} lm_head."
    ]


def test_weights_that_are_missing_are_named_by_the_run_and_by_load_model(cli, tmp_path):
    made.write(tmp_path / "nli", train=16, validation=8)
    made.tiny_bert(tmp_path / "bert")
    ran(cli("recipe", "finetune", *QUICK, "--model", "bert", "--output-dir", "plain"))
    assert "newly initialized" not in (tmp_path / "plain" / "report.md").read_text()
    norm = "encoder.layer.1.output.LayerNorm"
    edit(tmp_path / "bert", lambda weights: {name: value for name, value in weights.items() if norm not in name})
    sentence = f"--model bert {NEW} bert.{norm}."
    result = ran(cli("recipe", "finetune", *QUICK, "--model", "bert", "--output-dir", "out"))
    assert result.stderr.count(f"Warning: {sentence}") == 1
    assert (tmp_path / "out" / "report.md").read_text().count(f"Warning: {sentence}") == 1
    with pytest.warns(AttnRegWarning, match="newly initialized: bert.encoder.layer.1"):
        load_model(get_task("rte"), "bert")


def test_a_missing_pooler_that_nothing_reads_is_not_mentioned(tmp_path):
    made.tiny_bert(tmp_path)
    edit(tmp_path, lambda weights: {name: value for name, value in weights.items() if "pooler" not in name})
    task = get_task("rte")
    assert load_pretrained(task, str(tmp_path)).warnings == (f"--model {tmp_path} {NEW} bert.pooler.dense.",)
    assert load_pretrained(task, str(tmp_path), pooling="mean").warnings == ()


def test_weights_of_another_size_and_weights_that_are_not_used(tmp_path):
    made.tiny_bert(tmp_path)
    task = get_task("rte")
    assert load_pretrained(task, str(tmp_path)).warnings == ()
    configure(tmp_path, intermediate_size=32)
    (sentence,) = load_pretrained(task, str(tmp_path)).warnings
    assert f"{NEW} bert.enc" in sentence
    configure(tmp_path, intermediate_size=64, num_hidden_layers=1)
    (sentence,) = load_pretrained(task, str(tmp_path)).warnings
    assert sentence.endswith("has weights for which its configuration has no place, so they are not used: bert.encoder.layer.1.")  # fmt: skip


def test_a_bias_that_the_configuration_leaves_out(tmp_path):
    hf.LlamaModel(hf.LlamaConfig(**SIZES, attention_bias=True)).save_pretrained(tmp_path)
    configure(tmp_path, attention_bias=False)
    model, info = classifier().from_pretrained(tmp_path, output_loading_info=True)
    (sentence,) = weight_warnings(model, info, "it")
    assert "so they are not used: model.layers.0.self_attn.k_proj" in sentence


# --- classifiers and their classes


def test_a_classifier_that_was_trained_on_other_classes(tmp_path):
    tokenizer = made.word_pieces(made.TEXTS, 200)
    config = hf.BertConfig(**{**SIZES, "vocab_size": len(tokenizer)})
    for names, sentence in (
        (["LABEL_0", "LABEL_1"], "it was trained on LABEL_0, LABEL_1: they become entailment, not_ent"),
        (
            ["not_entailment", "entailment"],
            "it was trained on not_entailment, entailment: they become entailment, not_",
        ),
        (["ENTAILMENT", "NOT_ENTAILMENT"], None),
        (["a", "b", "c"], None),  # of another size, so it is new
    ):
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
        made.save(tmp_path, hf.BertForSequenceClassification(config), tokenizer)
        found = load_pretrained(get_task("rte"), str(tmp_path)).warnings
        kept = [f"classifier of --model {tmp_path} is kept, but {sentence}" in each for each in found]
        assert kept == [True] * (sentence is not None)


def test_a_saved_run_with_a_new_head_is_not_evaluated(cli, tmp_path):
    made.write(tmp_path / "nli", train=16, validation=8)
    made.tiny_bert(tmp_path / "bert")
    for folder, further in (("whole", []), ("adapter", ["--lora-rank", 2])):
        ran(cli("recipe", "finetune", *QUICK, "--model", "bert", *further, "--output-dir", folder))
        assert "Warning" not in ran(cli("evaluate", folder, "--device", "cpu")).stderr
    edit(tmp_path / "whole" / "model", lambda weights: {name: weights[name] for name in weights if "classif" not in name})  # fmt: skip
    result = cli("evaluate", "whole", "--device", "cpu")
    assert_sentence(result, 1, "lacks weights: classifier.bias, classifier.weight. Repeat the run.")


def test_classes_with_the_default_names_of_transformers_are_evaluated(cli, tmp_path):
    rows = [{"text": word, "label": f"LABEL_{number % 2}"} for number, word in enumerate(made.WORDS)]
    made.write_splits(tmp_path / "data", train=rows[:8], validation=rows[8:])
    made.tiny_bert(tmp_path / "bert")
    task = ["--task", "custom", "--text-columns", "text", "--data-dir", "data"]
    ran(cli("recipe", "finetune", *task, *QUICK[4:], "--model", "bert", "--output-dir", "out"))
    assert "id2label" not in json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    ran(cli("evaluate", "out", "--device", "cpu"))


# --- the model's own dropout


CONFIGS = {
    "bert": BERT,
    "distilbert": hf.DistilBertConfig(vocab_size=64, n_layers=1, n_heads=2, dim=8, hidden_dim=8),
    "gpt2": GPT2,
    "bart": hf.BartConfig(
        vocab_size=64, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8,
        decoder_attention_heads=2, decoder_ffn_dim=8, bos_token_id=0, pad_token_id=1, eos_token_id=2,
    ),
    "modernbert": hf.ModernBertConfig(**SIZES, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
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
    assert changed == set(dropout_options(before.config, 0.37, "it"))


def test_a_run_saves_the_rates_that_it_has_set(cli, tmp_path):
    args = ["--train-size", 32, "--epochs", 1, "--device", "cpu", "--model-dropout", 0.25, "--output-dir", "out"]
    ran(cli("recipe", "finetune", *args))
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert (config["hidden_dropout_prob"], config["attention_probs_dropout_prob"]) == (0.25, 0.25)


def test_a_model_without_dropout_is_refused(cli):
    with pytest.raises(ValueError, match=r"Model llama .* has no dropout rate in its configuration: remove"):
        dropout_options(hf.PreTrainedConfig(), 0.1, "llama")
    assert dropout_options(hf.PreTrainedConfig(), None, "llama") == {}
    result = cli("recipe", "finetune", "--model-dropout", 1)
    assert_sentence(result, 2, "Invalid value for '--model-dropout'")
