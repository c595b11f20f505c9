"""Tasks of every kind: words and their sub-words, choosing a task, heads, and what is trained on and scored."""

import math
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from attnreg.attendout.rewards import correctness, negative_loss
from attnreg.errors import InputError, UsageError
from attnreg.experiments.results.evaluation import predict
from attnreg.experiments.setup.batches import to_score
from attnreg.experiments.tasks import METRICS, TASKS, choose_task, get_task, load_data, load_model
from attnreg.experiments.tasks.kinds import KINDS, kind_class
from attnreg.experiments.tasks.kinds.kind import reading_of
from tests.helpers import task_data as made
from tests.helpers.repository import ROOT


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return made.tiny_bert(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    return made.tiny_marian(tmp_path_factory.mktemp("marian") / "model")


def tokens_kind(tokenizer, max_length=64, reading=None, labels=("O", "B-PER", "I-PER")):
    task = choose_task("conll2003")
    return kind_class("tokens")(replace(task, labels=labels), tokenizer, max_length, reading)


def rows_of(*rows, **features):
    return datasets.Dataset.from_list(list(rows), **features)


def predicted(network, rows, size, kind):
    return predict(network, to_score(rows, size, kind, torch.device("cpu")), kind)


def test_words_are_labelled_at_their_first_sub_word():
    tokenizer = made.word_pieces(["unbelievable", "ann"], 30)
    kind = tokens_kind(tokenizer)
    words, tags = ["unbelievable", "Ω", "ann", "annable"], ["O", "B-PER", "I-PER", "B-PER"]
    row = kind.encode(rows_of({"tokens": words, "ner_tags": tags}))[0]
    pieces = tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert len(pieces) > len(words) + 2
    expected, queue = [], [kind.task.labels.index(tag) for tag in tags]
    for piece in pieces:
        first = piece not in ("[CLS]", "[SEP]") and not piece.startswith("##")
        expected.append(queue.pop(0) if first else -100)
    assert row["labels"] == expected
    assert row["reference"] == {"labels": [0, 1, 2, 1], "words": [0, 1, 2, 3]}


def test_a_word_that_is_cut_off_is_answered_o_and_recall_suffers():
    kind = tokens_kind(made.word_pieces(made.TEXTS, 200), max_length=4)  # two words and [CLS], [SEP]
    tags = ["B-PER", "O", "B-PER", "I-PER"]
    row = kind.encode(rows_of({"tokens": ["Anna", "saw", "Bert", "Smith"], "ner_tags": tags}))[0]
    labelled = [label for label in row["labels"] if label != -100]
    assert len(row["input_ids"]) == 4
    record = kind.record(labelled, row["reference"])  # right, as far as it sees
    assert record["label"] == tags
    assert record["prediction"] == [*tags[: len(labelled)], *["O"] * (4 - len(labelled))]
    assert kind.score([record])["entity_f1"] < 1
    pos = replace(choose_task("ptb-pos"), labels=("NN", "VB"))
    kind = kind_class("tokens")(pos, kind.tokenizer, 4)
    row = kind.encode(rows_of({"tokens": ["Anna", "saw", "Bert"], "pos_tags": ["NN", "VB", "NN"]}))[0]
    record = kind.record([label for label in row["labels"] if label != -100], row["reference"])
    assert record["prediction"][-1] == "O"
    assert kind.score([record])["accuracy"] == pytest.approx(2 / 3)


def test_a_word_that_the_tokenizer_makes_nothing_of():
    kind = tokens_kind(made.word_pieces(made.TEXTS, 200))
    words, tags = ["Anna", "\u200b \t", "", "Bert"], ["B-PER", "O", "O", "B-PER"]
    row = kind.encode(rows_of({"tokens": words, "ner_tags": tags}))[0]
    seen = row["reference"]["words"]
    assert {0, 3} <= set(seen) < {0, 1, 2, 3}
    answer = [1 if word in (0, 3) else 0 for word in seen]
    assert kind.record(answer, row["reference"])["prediction"] == tags


def test_byte_level_tokenizers_get_the_space_that_words_have_in_a_sentence(tmp_path):
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        special_tokens=["<unk>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the cat saw the cat"] * 5, trainer)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    made.save(tmp_path, hf.RobertaModel(hf.RobertaConfig(vocab_size=len(tokenizer), **sizes)), tokenizer)
    _, loaded = load_model(get_task("conll2003"), str(tmp_path))
    ids = loaded(["the", "cat"], is_split_into_words=True)["input_ids"]
    assert loaded.convert_ids_to_tokens(ids) == ["Ġthe", "Ġcat"]


def test_tokenizers_without_words_are_refused():
    slow = SimpleNamespace(is_fast=False)
    with pytest.raises(InputError, match=r"The tokenizer of --model some \(Simple.*\) cannot map tokens to words"):
        kind_class("tokens")(get_task("conll2003")).fit_tokenizer(slow, "some")


@pytest.mark.parametrize("name", [name for name in TASKS if name != "custom"])
def test_every_task_is_whole(name):
    task = TASKS[name]
    kind = kind_class(task.kind)
    assert set(task.metrics) <= set(kind.metrics) <= set(METRICS)
    assert bool(task.labels) == (kind.has_classes and name != "ptb-pos")
    assert kind.needs_choices == bool(task.choices)
    assert task.embedded or task.hub or name in ("ptb-pos", "codah")
    assert 1 <= len(task.columns) <= kind.most_columns


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "mrpc", "kind": "tokens"}, "--kind, .* are only for --task custom: remove them for --task mrpc"),
        ({"name": "rte", "metric": "bleu"}, "Expected --metric for a classification task to be one of accuracy, f1, .* got 'bleu'"),
        ({"name": "custom", "text_columns": "a,b,c"}, "Expected at most 2 --text-columns for --kind classification, got 3"),
        ({"name": "custom", "text_columns": "a,"}, "Expected --text-columns to be different column names"),
        ({"name": "custom", "text_columns": "a,a"}, "Expected --text-columns to be different column names"),
        ({"name": "custom", "text_columns": "a", "kind": "speech"}, "Expected --kind to be one of classification, .* got 'speech'"),
        ({"name": "custom", "text_columns": "a", "kind": "token"}, r"Expected --kind to be one of .*, got 'token'. Did you mean tokens\?$"),
        ({"name": "custom", "text_columns": "a", "kind": "multiple-choice"}, r"Expected --choice-columns for --kind multiple-choice \(two or more, or one of lists\)"),
        ({"name": "custom", "text_columns": "a", "choice_columns": "b,c"}, "Expected --choice-columns .* got b,c for --kind classification"),
        ({"name": "custom", "text_columns": "a", "kind": "tokens", "metric": "f1"}, "to be one of accuracy, entity_f1, got 'f1'"),
        ({"name": "custom", "kind": "causal-lm", "metric": "perplexity"}, "to be one of accuracy, exact_match, got 'perplexity'"),
        ({"name": "custom", "kind": "question-answering", "metric": "f1"}, "to be one of answer_f1, exact_match, got 'f1'"),
        ({"name": "custom", "text_columns": "a", "label_column": "a"}, "Column a holds the labels, so it cannot be a text or choice column, too"),
    ],
)  # fmt: skip
def test_wrong_choices(options, says):
    with pytest.raises(UsageError, match=says):
        choose_task(**options)


def test_classes_of_another_task():
    assert reading_of(("not_entailment", "entailment"), get_task("rte")) == [1, 0]
    assert reading_of(("not_duplicate", "duplicate"), get_task("paws-x")) == [0, 1]
    with pytest.raises(InputError, match=r"The model's class 'negative' does not exist in task .* the model has negative, positive"):  # fmt: skip
        reading_of(get_task("sst2").labels, get_task("hans"))


def test_multiple_choice_rows_are_beginnings_with_each_ending(bert):
    model, tokenizer = load_model(get_task("swag"), str(bert))
    kind = kind_class("multiple-choice")(get_task("swag"), tokenizer, 32)
    row = made.make(made.endings, 1, 0)[0]
    rows = kind.encode(rows_of(row, {**row, "sent2": "", "label": 3}))
    texts = tokenizer.batch_decode(rows[0]["input_ids"])
    assert texts == [f"[CLS] {row['sent1']} [SEP] {row['sent2']} {row[f'ending{i}']} [SEP]" for i in range(4)]
    assert tokenizer.decode(rows[1]["input_ids"][0]) == f"[CLS] {row['sent1']} [SEP] {row['ending0']} [SEP]"
    labelled = to_score(rows, 2, kind, torch.device("cpu"))
    assert labelled.batches[0]["input_ids"].shape[:2] == (2, 4)
    records = predict(model, labelled, kind).records
    assert [record["label"] for record in records] == [row["label"], 3]
    assert kind.lengths(rows) == [max(map(len, ids)) for ids in rows["input_ids"]]


def one_batch(task, model, rows):
    network, tokenizer = load_model(task, str(model))
    kind = kind_class(task.kind)(task, tokenizer, 32)
    labelled = to_score(kind.encode(rows_of(*rows)), len(rows), kind, torch.device("cpu"))
    return network.eval(), labelled, kind


def test_every_kind_is_tried_and_has_a_row_in_the_docs():
    of_other_files = {"classification", "causal-lm", "masked-lm", "image-classification", "question-answering"}
    tried = of_other_files | {get_task(name).kind for name in made.KINDS}
    assert tried == {*KINDS}, "give each kind a built-in task in KINDS of tests/helpers/task_data.py"
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"| `{kind}` |" not in page] == []


@pytest.mark.parametrize("name", made.KINDS)
@torch.no_grad()
def test_scores_of_the_game_are_per_sample(name, request):
    maker, model = made.KINDS[name]
    network, labelled, kind = one_batch(get_task(name), request.getfixturevalue(model), made.make(maker, 5, 0))
    batch = labelled.batches[0]
    scores = negative_loss(network, batch)
    assert scores.shape == (5,)
    alone = [negative_loss(network, {key: value[i : i + 1] for key, value in batch.items()}) for i in range(5)]
    assert torch.allclose(scores, torch.cat(alone), atol=1e-5)
    assert predict(network, labelled, kind).loss == pytest.approx(float(network(**batch).loss), rel=1e-5)
    if not kind.one_number_per_row:
        right = correctness(network, batch)
        assert right.shape == (5,)
        assert ((right >= 0) & (right <= 1)).all()
    else:
        with pytest.raises(InputError, match="Use score 'loss' for regression"):
            correctness(network, batch)


def test_a_text_is_held_against_the_whole_reference(marian):
    long = {"translation": {"en": "red " * 60, "ro": "rot " * 60}}
    network, labelled, kind = one_batch(get_task("wmt16-en-ro"), marian, [long])
    assert labelled.batches[0]["input_ids"].shape[1] == 32
    assert labelled.batches[0]["labels"].shape[1] == 32
    record = predict(network, labelled, kind).records[0]
    assert record["label"] == "rot " * 60
    assert len(record["prediction"].split()) <= 32


def test_models_without_the_head_are_refused(bert, marian):
    for task, model, head in (("wmt16-en-ro", bert, "Seq2SeqLM"), ("conll2003", marian, "TokenClassification")):
        with pytest.raises(
            InputError, match=f"The task needs AutoModelFor{head}, which does not support the architecture"
        ):
            load_model(get_task(task), str(model))


def test_a_head_of_other_classes_is_made_anew(bert, tmp_path):
    model, tokenizer = load_model(get_task("mnli"), str(bert))
    made.save(tmp_path, model, tokenizer)
    again, _ = load_model(get_task("rte"), str(tmp_path))
    assert again.config.num_labels == 2
    assert torch.equal(again.base_model.embeddings.word_embeddings.weight, model.base_model.embeddings.word_embeddings.weight)  # fmt: skip
    same, _ = load_model(get_task("mnli"), str(tmp_path))
    assert torch.equal(same.classifier.weight, model.classifier.weight)


def test_a_model_of_numbers_gets_a_head_of_classes(bert, tmp_path):
    rows = [{"sentence1": "red", "sentence2": "one", "label": label} for label in (0, 1)]
    for number, said in enumerate(("regression", "multi_label_classification")):
        model, tokenizer = load_model(get_task("stsb"), str(bert))
        model.config.problem_type = said
        folder = made.save(tmp_path / str(number), model, tokenizer)
        network, labelled, kind = one_batch(get_task("rte"), folder, rows)
        assert network.config.problem_type == "single_label_classification"
        loss = predict(network, labelled, kind).loss
        scores = network(**labelled.batches[0]).logits.log_softmax(-1)
        assert loss == pytest.approx(-float(scores.diagonal().mean().detach()), rel=1e-5)


def test_micro_f1_is_accuracy_only_where_a_kind_does_not_have_it(monkeypatch):
    assert choose_task("ptb-pos", metric="micro_f1").metrics == ("accuracy",)  # one tag and one prediction per word
    monkeypatch.setattr(kind_class("tokens"), "metrics", ("accuracy", "micro_f1"))
    assert choose_task("ptb-pos", metric="micro_f1").metrics[0] == "micro_f1"


def test_a_column_called_labels_does_not_give_labels_its_type(bert, tmp_path):
    rows = [{"text": "red", "labels": label} for label in (0.0, 1.0)]
    task = choose_task("custom", text_columns="text", label_column="labels")
    task, splits = load_data(task, made.write_splits(tmp_path / "data", train=rows, validation=rows))
    network, labelled, kind = one_batch(task, bert, [*splits["train"]])
    assert labelled.batches[0]["labels"].tolist() == [0, 1]
    assert math.isfinite(predict(network, labelled, kind).loss)


def test_rows_without_a_labelled_word_are_scored_and_not_trained_on(bert):
    unseen, seen = ({"tokens": [word], "ner_tags": ["B-PER"]} for word in (" \t", "Anna"))
    task = get_task("conll2003")
    model, tokenizer = load_model(task, str(bert))
    kind = kind_class("tokens")(task, tokenizer, 32)
    rows = kind.encode(rows_of(unseen, seen, unseen))
    assert [row["labels"] for row in kind.to_train_on(rows)] == [rows[1]["labels"]]
    with pytest.raises(InputError, match=r"None of 2 rows has a word that the model sees: check"):
        kind.to_train_on(kind.encode(rows_of(unseen, unseen)))
    alone = predicted(model, rows, 1, kind)
    assert math.isfinite(alone.loss)
    assert [record["prediction"] for record in (alone.records[0], alone.records[2])] == [["O"], ["O"]]
    assert alone.loss == pytest.approx(predicted(model, rows, 3, kind).loss)
    assert predicted(model, rows.select([0]), 1, kind).loss is None


def test_rows_are_scored_beside_those_of_their_length_and_told_in_their_order(bert):
    model, tokenizer = load_model(get_task("cola"), str(bert))
    kind = kind_class("classification")(get_task("cola"), tokenizer, 32)
    texts = ["the red one went far", "red", "the one went", "one"]
    rows = kind.encode(rows_of(*({"sentence": text, "label": len(text) % 2} for text in texts)))
    labelled = to_score(rows, 2, kind, torch.device("cpu"))
    assert [batch["input_ids"].shape[1] for batch in labelled.batches] == [3, 7]
    together = predict(model, labelled, kind)
    alone = [predicted(model, rows.select([row]), 1, kind) for row in range(4)]
    assert [record["label"] for record in together.records] == [len(text) % 2 for text in texts]
    for record, each in zip(together.records, alone, strict=True):
        assert record["logits"] == pytest.approx(each.records[0]["logits"], abs=1e-5)
    assert together.loss == pytest.approx(sum(each.loss for each in alone) / 4, rel=1e-5)


def test_a_decoder_alone_is_refused_for_texts_from_texts():
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(InputError, match=r"some \(GPT2LMHeadModel\) is no encoder with a decoder: choose one that is"):
        kind_class("seq2seq")(get_task("wmt16-en-ro")).check_model(model, "some")


def test_the_end_of_text_stands_in_for_padding(tmp_path):
    tokenizer = made.word_pieces(made.TEXTS, 200)
    tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    config = hf.GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=8, n_layer=1, n_head=1, pad_token_id=0)
    made.save(tmp_path, hf.GPT2Model(config), tokenizer)
    rows = [{"sentence": text, "label": 1} for text in ("red", "the red one went far")]
    network, labelled, kind = one_batch(get_task("cola"), tmp_path, rows)
    assert kind.tokenizer.pad_token == "[SEP]"
    assert network.config.pad_token_id == kind.tokenizer.eos_token_id
    assert labelled.batches[0]["input_ids"][0, -1] == kind.tokenizer.eos_token_id
    together = predict(network, labelled, kind).records
    alone = predicted(network, kind.encode(rows_of(*rows)), 1, kind).records
    assert together[0]["logits"] == pytest.approx(alone[0]["logits"], abs=1e-5)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"needs a padding token and at most .* tokens, as many as the model embeds; got"):  # fmt: skip
        load_model(get_task("cola"), str(tmp_path))


def test_a_model_without_a_table_of_embeddings(bert, monkeypatch):
    def none(self):
        raise NotImplementedError

    monkeypatch.setattr(hf.BertForSequenceClassification, "get_input_embeddings", none)
    assert load_model(get_task("cola"), str(bert))[0].config.num_labels == 2


def test_a_package_that_a_model_needs_is_named(bert, monkeypatch):
    def from_pretrained(name):
        raise ImportError("\nAutoTokenizer requires the SentencePiece library, but it was not found.\n")

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(InputError, match=r"Cannot load --model .*: AutoTokenizer requires the SentencePiece library"):
        load_model(get_task("agreement"), str(bert))
