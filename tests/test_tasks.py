"""Tasks of every kind: metrics against slow formulas, words and their sub-words, choosing a task, reading its data."""

import gc
import math
import random
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from attnreg.errors import InputError, UsageError
from attnreg.tasks import METRICS, TASKS, choose_task, get_task, load_data, load_model, load_splits
from attnreg.tasks.kinds import KINDS, kind_class
from attnreg.tasks.kinds.base import reading_of
from attnreg.training.batches import in_order
from attnreg.training.evaluation import predict
from attnreg.training.rewards import correctness, negative_loss
from tests import task_data as made


def score(name, predictions, references):
    return METRICS[name](keep_in_memory=True).compute(predictions=predictions, references=references)[name]


def spans(tags):
    """The entities of a row, as CoNLL's script finds them: type, first and last word."""
    found, start, of = [], None, None
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if start is not None and (prefix != "I" or kind != of):
            found.append((of, start, place - 1))
            start = None
        if prefix != "O" and start is None:
            start, of = place, kind
    return found


def test_entity_f1_against_spans_matched_by_hand():
    rng = random.Random(0)
    tags = ["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    for _ in range(20):
        gold = [[rng.choice(tags) for _ in range(rng.randint(1, 7))] for _ in range(6)]
        given = [[tag if rng.random() < 0.7 else rng.choice(tags) for tag in row] for row in gold]
        ours, theirs = ({(i, *span) for i, row in enumerate(rows) for span in spans(row)} for rows in (given, gold))
        right = len(ours & theirs)
        expected = 2 * right / (len(ours) + len(theirs)) if ours or theirs else 0.0
        assert score("entity_f1", given, gold) == pytest.approx(expected)


def test_entity_f1_without_entities():
    assert score("entity_f1", [["O", "O"]], [["B-PER", "O"]]) == 0
    assert score("entity_f1", [["O"]], [["O"]]) == 0


def ranks(values):
    """Ranks, ties sharing their mean."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]


def test_correlations_against_numpy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=40), rng.integers(0, 5, 40).astype(float)
    assert score("pearson", a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert score("spearman", a, b) == pytest.approx(np.corrcoef(ranks(a), ranks(b))[0, 1])
    for name in ("pearson", "spearman"):
        assert score(name, [2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == 0
        assert score(name, [2.0], [1.0]) == 0


def bleu(predictions, references):
    """Papineni's formula, without smoothing, on words with spaces between them."""
    logs, long, short = 0.0, 0, 0
    for n in range(1, 5):
        right = total = 0
        for ours, theirs in zip(predictions, references, strict=True):
            a, b = (Counter(zip(*(row.split()[i:] for i in range(n)))) for row in (ours, theirs))  # noqa: B905
            right, total = right + sum((a & b).values()), total + sum(a.values())
        logs += math.log(right / total) / 4
    for ours, theirs in zip(predictions, references, strict=True):
        long, short = long + len(theirs.split()), short + len(ours.split())
    return 100 * min(1.0, math.exp(1 - long / short)) * math.exp(logs)


def test_bleu_against_its_formula():
    rng = random.Random(0)
    references = [" ".join(rng.choice("abcdefgh") for _ in range(rng.randint(8, 14))) for _ in range(30)]
    predictions = [" ".join(w if rng.random() < 0.85 else "x" for w in row.split()[:-1]) for row in references]
    assert score("bleu", predictions, references) == pytest.approx(bleu(predictions, references))
    assert score("bleu", references, references) == pytest.approx(100)


def test_f1_by_counting():
    rng = np.random.default_rng(0)
    labels, given = rng.integers(0, 2, (2, 50))
    right = int((labels & given).sum())
    assert score("f1", given, labels) == pytest.approx(2 * right / (labels.sum() + given.sum()))
    assert score("f1", [0, 0], [0, 0]) == 0
    labels, given = rng.integers(0, 3, (2, 50))
    each = [2 * ((labels == c) & (given == c)).sum() / ((labels == c).sum() + (given == c).sum()) for c in range(3)]
    assert score("macro_f1", given, labels) == pytest.approx(np.mean(each))


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
    row = kind.encode(rows_of({"tokens": ["Anna", "\u200b \t", "", "Bert"], "ner_tags": ["B-PER", "O", "O", "B-PER"]}))[
        0
    ]
    seen = row["reference"]["words"]
    assert {0, 3} <= set(seen) < {0, 1, 2, 3}
    answer = [1 if word in (0, 3) else 0 for word in seen]
    assert kind.record(answer, row["reference"])["prediction"] == ["B-PER", "O", "O", "B-PER"]


def test_byte_level_tokenizers_get_the_space_that_words_have_in_a_sentence(tmp_path):
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        special_tokens=["<unk>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the cat saw the cat"] * 5, trainer)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path)
    config = hf.RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    hf.RobertaModel(config).save_pretrained(tmp_path)
    _, loaded = load_model(get_task("conll2003"), str(tmp_path))
    ids = loaded(["the", "cat"], is_split_into_words=True)["input_ids"]
    assert loaded.convert_ids_to_tokens(ids) == ["Ġthe", "Ġcat"]


def test_tokenizers_without_words_are_refused():
    class Slow:
        is_fast = False

    with pytest.raises(InputError, match=r"Expected --model some with a fast tokenizer, .* got Slow"):
        kind_class("tokens").fit_tokenizer(Slow(), "some")


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_whole(name):
    task = TASKS[name]
    if name == "custom":
        return
    kind = kind_class(task.kind)
    assert set(task.metrics) <= set(kind.metrics) <= set(METRICS)
    assert bool(task.labels) == (kind.has_classes and name != "ptb-pos")
    assert kind.needs_choices == bool(task.choices)
    assert task.embedded or task.hub or name in ("ptb-pos", "codah")
    assert 1 <= len(task.columns) <= kind.most_columns


def test_every_kind_has_a_head_of_transformers():
    for name in KINDS:
        assert hasattr(hf, kind_class(name).head)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "mrpc", "kind": "tokens"}, "Expected --kind with --task custom alone, got it with --task mrpc"),
        ({"name": "rte", "metric": "bleu"}, "Expected --metric of a classification task among accuracy, f1, .* got 'bleu'"),
        ({"name": "custom"}, "Expected --text-columns with --task custom"),
        ({"name": "custom", "text_columns": "a,b,c"}, "Expected at most 2 --text-columns for kind classification, got 3"),
        ({"name": "custom", "text_columns": "a,"}, "Expected --text-columns as names of columns"),
        ({"name": "custom", "text_columns": "a,a"}, "Expected --text-columns as names of columns"),
        ({"name": "custom", "text_columns": "a", "kind": "speech"}, "Expected --kind among classification, .* got 'speech'"),
        ({"name": "custom", "text_columns": "a", "kind": "multiple-choice"}, "Expected --choice-columns with two names or more"),
        ({"name": "custom", "text_columns": "a", "choice_columns": "b,c"}, "Expected --choice-columns .* got b,c with --kind classification"),
        ({"name": "custom", "text_columns": "a", "kind": "tokens", "metric": "f1"}, "among accuracy, entity_f1, got 'f1'"),
    ],
)  # fmt: skip
def test_wrong_choices(options, says):
    with pytest.raises(UsageError, match=says):
        choose_task(**options)


def write(folder, **splits):
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        if isinstance(rows, list):
            made.write_rows(folder / f"{split}.jsonl", rows)
        else:
            rows.to_parquet(folder / f"{split}.parquet")
    return folder


def test_labels_by_name_by_number_and_as_the_data_names_them(tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in ("not_entailment", "entailment")]
    folder = write(tmp_path / "names", train=rows, validation=rows)
    kind = kind_class("classification")
    assert kind.gold(get_task("rte"), load_splits(get_task("rte"), folder)["train"]) == [1, 0]
    features = datasets.Features(
        {
            "sentence1": datasets.Value("string"),
            "sentence2": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["not_entailment", "entailment"]),  # in another order than the task's
        }
    )
    table = datasets.Dataset.from_list(rows, features=features)
    folder = write(tmp_path / "parquet", train=table, validation=table)
    task, splits = load_data(get_task("rte"), folder)
    assert list(splits["train"]["label"]) == [0, 1]
    assert kind.gold(task, splits["train"]) == [1, 0]


def test_the_hubs_integer_tags_mean_the_same_as_their_names(tmp_path):
    names = list(get_task("conll2003").labels)
    tags = ["B-PER", "I-PER", "O"]
    numbers = {"tokens": ["Anna", "Smith", "went"], "ner_tags": [names.index(tag) for tag in tags], "id": "0"}
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "tokens": datasets.List(datasets.Value("string")),
            "ner_tags": datasets.List(datasets.ClassLabel(names=names)),
        }
    )
    task, kind = get_task("conll2003"), kind_class("tokens")
    for number, table in enumerate(
        ([numbers], [{**numbers, "ner_tags": tags}], datasets.Dataset.from_list([numbers], features=features))
    ):
        folder = write(tmp_path / str(number), train=table, validation=table)
        assert kind.gold(task, load_splits(task, folder)["train"]) == [[1, 2, 0]]


def test_labels_of_ones_own_set_are_read_off_all_of_it(tmp_path):
    def rows(*labels):
        return [{"text": "a", "stars": label} for label in labels]

    custom = choose_task("custom", text_columns="text", label_column="stars")
    for number, (train, validation, names) in enumerate(
        [
            (rows(10, 2, 5), rows(5), ("2", "5", "10")),
            (rows(10, 2, 5), rows("5"), ("2", "5", "10")),
            (rows("good", "bad", "so-so"), rows("so-so"), ("bad", "good", "so-so")),
            (rows(True, False), rows(True), ("False", "True")),
            (rows(1.0, 3.0), rows(1.0), ("1", "3")),
        ]
    ):
        folder = write(tmp_path / str(number), train=train, validation=validation)
        task, splits = load_data(custom, folder)
        assert task.labels == names
        first = train[0]["stars"]
        expected = names.index(str(int(first) if isinstance(first, float) else first))
        assert kind_class("classification").gold(task, splits["train"])[0] == expected


def test_splits_by_the_hubs_names(tmp_path):
    rows = made.make(made.pair, 4, 0)
    folder = write(tmp_path / "mnli", train=rows, validation_matched=rows[:3], validation_mismatched=rows[:2])
    splits = load_splits(get_task("mnli"), folder)
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": 4, "validation": 3, "validation_mismatched": 2,
    }  # fmt: skip
    assert list(load_splits(get_task("mnli"), write(tmp_path / "plain", train=rows, validation=rows))) == [
        "train", "validation",
    ]  # fmt: skip
    reviews = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]
    folder = write(tmp_path / "imdb", train=reviews, test=reviews[:1])
    assert {name: len(rows) for name, rows in load_splits(get_task("imdb"), folder).items()} == {
        "train": 2, "validation": 1,
    }  # fmt: skip
    hans = [{"premise": "a", "hypothesis": "b", "label": "non-entailment"}]
    assert list(load_splits(get_task("hans"), write(tmp_path / "hans", validation=hans))) == ["validation"]
    unlabelled = [{**row, "label": -1.0} for row in made.make(made.similarity, 2, 0)]
    folder = write(tmp_path / "stsb", train=made.make(made.similarity, 2, 0),
                   validation=made.make(made.similarity, 2, 1), test=unlabelled)  # fmt: skip
    assert "test" not in load_splits(get_task("stsb"), folder)


@pytest.mark.parametrize(
    ("task", "change", "says"),
    [
        ("stsb", {"label": math.nan}, "Expected finite numbers in column label, got nan in row 2 of split train"),
        ("stsb", {"label": None}, "Expected finite numbers in column label, got None in row 2 of split train"),
        ("conll2003", {"tokens": "Anna went"}, "Expected a list in column tokens, got .*split train"),
        ("conll2003", {"ner_tags": ["O"]}, "Expected one label in column ner_tags for each word .* got 2 words and 1 labels in row 2"),
        ("conll2003", {"tokens": [], "ner_tags": []}, "got 0 words and 0 labels in row 2"),
        ("conll2003", {"tokens": ["a", None]}, "Expected words in column tokens, got None in row 2"),
        ("conll2003", {"ner_tags": ["O", "B-DOG"]}, r"Expected labels 0 \(O\), 1 \(B-PER\), .* got 'B-DOG' in row 2"),
        ("swag", {"label": 4}, "Expected the number of a choice, 0 to 3, in column label, got 4 in row 2"),
        ("swag", {"ending2": None}, "Expected text in column ending2, got None in row 2"),
        ("codah", {"sent2": None}, "Expected text in column sent2, got None in row 2"),
        ("wmt16-en-ro", {"translation": {"en": "red"}}, "Expected text in column translation.ro, got None in row 2"),
        ("mnli", {"label": 3}, r"Expected labels 0 \(entailment\), 1 \(neutral\), 2 \(contradiction\), got 3 in row 2"),
        ("mnli", {"label": "maybe"}, "got"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, task, change, says):
    makers = {"stsb": made.similarity, "swag": made.endings, "codah": made.endings, "wmt16-en-ro": made.translation, "mnli": made.pair}  # fmt: skip
    rows = made.make(makers.get(task, lambda rng: {"tokens": ["Anna", "went"], "ner_tags": ["B-PER", "O"]}), 3, 0)
    if isinstance(change.get("tokens"), str):  # a column of text, as .csv has it
        rows = [{**row, "tokens": " ".join(row["tokens"])} for row in rows]
    if change.get("label") == "maybe":
        rows = [{**row, "label": "neutral"} for row in rows]
    bad = [rows[0], {**rows[1], **change}, rows[2]]
    folder = write(tmp_path / "data", train=bad, validation=rows)
    with pytest.raises(InputError, match=says):
        load_splits(get_task(task), folder)


def test_columns_that_are_missing(tmp_path):
    rows = [{"tokens": ["a"], "tags": ["O"]}]
    folder = write(tmp_path / "tags", train=rows, validation=rows)
    with pytest.raises(InputError, match="Expected columns tokens, ner_tags for task 'conll2003', got tokens, tags"):
        load_splits(get_task("conll2003"), folder)
    rows = [{"en": "red", "ro": "rot"}]
    folder = write(tmp_path / "flat", train=rows, validation=rows)
    with pytest.raises(InputError, match="Expected columns translation for task 'wmt16-en-ro', got en, ro"):
        load_splits(get_task("wmt16-en-ro"), folder)
    with pytest.raises(InputError, match="Expected --data-dir with task 'ptb-pos', which is not on the hub, got none"):
        load_splits(get_task("ptb-pos"))


@pytest.mark.parametrize(
    ("options", "rows", "says"),
    [
        ({"metric": "f1"}, ["a", "b", "c"], "Expected two classes for metric f1, got 3 in column label .* --metric macro_f1"),
        ({}, ["a", "a"], "Expected at least two classes in column label of .*, got a"),
        ({"kind": "tokens", "metric": "entity_f1"}, [["NN"], ["VB"]], "Expected labels such as O, B-PER, I-PER for metric entity_f1, got 'NN'"),
        ({"kind": "tokens"}, [["NN"], ["NN"]], "Expected lists with at least two classes in column label of .*, got NN"),
    ],
)  # fmt: skip
def test_labels_that_do_not_fit_the_metric(tmp_path, options, rows, says):
    data = [{"text": ["a"] if options.get("kind") else "a", "label": label} for label in rows]
    folder = write(tmp_path / "data", train=data, validation=data)
    with pytest.raises(InputError, match=says):
        load_data(choose_task("custom", text_columns="text", **options), folder)


def test_classes_of_another_task():
    assert reading_of(("not_entailment", "entailment"), get_task("rte")) == [1, 0]
    assert reading_of(("not_duplicate", "duplicate"), get_task("paws-x")) == [0, 1]
    with pytest.raises(
        InputError, match=r"Expected a model whose classes are among .* got 'negative' among negative, positive"
    ):
        reading_of(get_task("sst2").labels, get_task("hans"))


def test_multiple_choice_rows_are_beginnings_with_each_ending(bert):
    model, tokenizer = load_model(get_task("swag"), str(bert))
    kind = kind_class("multiple-choice")(get_task("swag"), tokenizer, 32)
    row = made.make(made.endings, 1, 0)[0]
    rows = kind.encode(rows_of(row, {**row, "sent2": "", "label": 3}))
    texts = tokenizer.batch_decode(rows[0]["input_ids"])
    assert texts == [f"[CLS] {row['sent1']} [SEP] {row['sent2']} {row[f'ending{i}']} [SEP]" for i in range(4)]
    assert tokenizer.decode(rows[1]["input_ids"][0]) == f"[CLS] {row['sent1']} [SEP] {row['ending0']} [SEP]"
    labelled = in_order(rows, 2, kind, torch.device("cpu"))
    assert labelled.batches[0]["input_ids"].shape[:2] == (2, 4)
    records = predict(model, labelled, kind).records
    assert [record["label"] for record in records] == [row["label"], 3]
    assert kind.length(rows[0]["input_ids"]) == max(map(len, rows[0]["input_ids"]))


def one_batch(task, model, rows):
    network, tokenizer = load_model(task, str(model))
    kind = kind_class(task.kind)(task, tokenizer, 32)
    labelled = in_order(kind.encode(rows_of(*rows)), len(rows), kind, torch.device("cpu"))
    return network.eval(), labelled, kind


@pytest.mark.parametrize(
    ("name", "maker", "model"),
    [
        ("mnli", made.pair, "bert"),
        ("stsb", made.similarity, "bert"),
        ("conll2003", made.entities, "bert"),
        ("swag", made.endings, "bert"),
        ("wmt16-en-ro", made.translation, "marian"),
    ],
)
@torch.no_grad()
def test_scores_of_the_game_are_per_sample(name, maker, model, request):
    network, labelled, kind = one_batch(get_task(name), request.getfixturevalue(model), made.make(maker, 5, 0))
    batch = labelled.batches[0]
    scores = negative_loss(network, batch)
    assert scores.shape == (5,)
    alone = [negative_loss(network, {key: value[i : i + 1] for key, value in batch.items()}) for i in range(5)]
    assert torch.allclose(scores, torch.cat(alone), atol=1e-5)
    assert predict(network, labelled, kind).loss == pytest.approx(float(network(**batch).loss), rel=1e-5)
    if kind.can_be_right:
        right = correctness(network, batch)
        assert right.shape == (5,)
        assert ((right >= 0) & (right <= 1)).all()
    else:
        with pytest.raises(InputError, match="use score 'loss' for regression"):
            correctness(network, batch)


def test_a_text_is_held_against_the_whole_reference(marian):
    network, labelled, kind = one_batch(
        get_task("wmt16-en-ro"), marian, [{"translation": {"en": "red " * 60, "ro": "rot " * 60}}]
    )
    assert labelled.batches[0]["input_ids"].shape[1] == 32
    assert labelled.batches[0]["labels"].shape[1] == 32
    record = predict(network, labelled, kind).records[0]
    assert record["label"] == "rot " * 60
    assert len(record["prediction"].split()) <= 32


def test_models_without_the_head_are_refused(bert, marian):
    for task, model, head in (("wmt16-en-ro", bert, "AutoModelForSeq2SeqLM"), ("conll2003", marian, "AutoModelForTokenClassification")):  # fmt: skip
        with pytest.raises(InputError, match=f"of an architecture that {head} knows, as the task needs, got"):
            load_model(get_task(task), str(model))


def test_a_head_of_other_classes_is_made_anew(bert, tmp_path):
    model, tokenizer = load_model(get_task("mnli"), str(bert))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
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
        model.save_pretrained(tmp_path / str(number))
        tokenizer.save_pretrained(tmp_path / str(number))
        network, labelled, kind = one_batch(get_task("rte"), tmp_path / str(number), rows)
        assert network.config.problem_type == "single_label_classification"
        loss = predict(network, labelled, kind).loss
        scores = network(**labelled.batches[0]).logits.log_softmax(-1)
        assert loss == pytest.approx(-float(scores.diagonal().mean().detach()), rel=1e-5)


def test_rows_without_a_labelled_word_are_scored_and_not_trained_on(bert):
    unseen, seen = ({"tokens": [word], "ner_tags": ["B-PER"]} for word in (" \t", "Anna"))
    task = get_task("conll2003")
    model, tokenizer = load_model(task, str(bert))
    kind = kind_class("tokens")(task, tokenizer, 32)
    rows = kind.encode(rows_of(unseen, seen, unseen))
    assert [row["labels"] for row in kind.to_train_on(rows)] == [rows[1]["labels"]]
    with pytest.raises(
        InputError, match=r"Expected training rows with words that the model sees .* got 2 rows without"
    ):
        kind.to_train_on(kind.encode(rows_of(unseen, unseen)))
    alone = predict(model, in_order(rows, 1, kind, torch.device("cpu")), kind)
    assert math.isfinite(alone.loss)
    assert [record["prediction"] for record in (alone.records[0], alone.records[2])] == [["O"], ["O"]]
    assert alone.loss == pytest.approx(predict(model, in_order(rows, 3, kind, torch.device("cpu")), kind).loss)
    assert predict(model, in_order(rows.select([0]), 1, kind, torch.device("cpu")), kind).loss is None


def test_a_class_that_is_not_trained_on_is_named(tmp_path):
    def rows(*labels):
        return [{"text": "a", "label": label} for label in labels]

    custom = choose_task("custom", text_columns="text")
    for number, (train, others, says) in enumerate(
        [
            (rows(True, False), {"validation": rows(0, 1)}, "got '0' in split validation of"),
            (rows("x", "y"), {"validation": rows("x"), "test": rows("x", "z")}, "got 'z' in split test of"),
        ]
    ):
        folder = write(tmp_path / str(number), train=train, **others)
        with pytest.raises(InputError, match=f"Expected labels in column label that split train has as well, {says}"):
            load_data(custom, folder)
    words = [{"text": ["a", "b"], "label": ["X", "Y"]}]
    folder = write(tmp_path / "words", train=words, validation=[{"text": ["a"], "label": ["Z"]}])
    with pytest.raises(InputError, match="got 'Z' in split validation of"):
        load_data(choose_task("custom", kind="tokens", text_columns="text"), folder)
    named = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y", "z"])})
    tables = [datasets.Dataset.from_list(some, features=named) for some in (rows("x", "y"), rows("z"))]
    folder = write(tmp_path / "named", train=tables[0], validation=tables[1])
    assert load_data(custom, folder)[0].labels == ("x", "y", "z")


def tables(folder, suffix, **splits):
    folder.mkdir()
    for split, rows in splits.items():
        text = "\n".join(("," if suffix == "csv" else "\t").join(row) for row in rows)
        (folder / f"{split}.{suffix}").write_text(text + "\n")
    return folder


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_the_bad_label_of_a_column_is_the_one_that_is_named(tmp_path, suffix):
    head = ("sentence", "label")
    good, bad = ([head, *(("red", label) for label in labels)] for labels in (("0", "1"), ("0", "1", "1", "0", "?")))
    folder = tables(tmp_path / "cola", suffix, train=bad, validation=good)
    with pytest.raises(InputError, match=r"Expected labels 0 \(unacceptable\), .* got '\?' in row 5 of split train"):
        load_splits(get_task("cola"), folder)
    head, rows = ("sentence1", "sentence2", "label"), [("a", "b", "1.5"), ("a", "b", "2")]
    folder = tables(tmp_path / "stsb", suffix, train=[head, *rows, ("a", "b", "?")], validation=[head, *rows])
    with pytest.raises(InputError, match=r"Expected finite numbers in column label, got '\?' in row 3 of split train"):
        load_splits(get_task("stsb"), folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bad_label_far_down_is_named(tmp_path):
    rows = [("sentence", "label"), *[("red", "1")] * 12_000]  # more than are read at a time
    folder = tables(tmp_path / "many", "csv", train=[*rows, ("red", "?")], validation=rows)
    with pytest.raises(InputError, match=r"got '\?' in row 12001 of split train"):
        load_splits(get_task("cola"), folder)
    gc.collect()  # datasets leaves a file open where reading fails


def test_labels_that_are_numbers_as_text(tmp_path):
    for name, maker, gold in (("cola", None, [0, 1]), ("stsb", made.similarity, None), ("swag", made.endings, None)):
        rows = made.make(maker, 4, 0) if maker else [{"sentence": "a", "label": label} for label in (0, 1)]
        gold = gold or [row["label"] for row in rows]
        text = [{**row, "label": str(row["label"])} for row in rows]
        splits = load_splits(get_task(name), write(tmp_path / name, train=text, validation=rows))
        kind = kind_class(get_task(name).kind)
        assert kind.gold(get_task(name), splits["train"]) == gold


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_columns_of_numbers_are_text_where_text_is_wanted(tmp_path, suffix):
    options = {"text_columns": "question", "label_column": "answer"}
    rows = [("question", "a", "b", "answer"), ("007", "1", "2.50", "0"), ("12", "NA", "-4", "1")]
    folder = tables(tmp_path / "data", suffix, train=rows, validation=rows)
    custom = choose_task("custom", kind="multiple-choice", choice_columns="a,b", **options)
    train = load_splits(custom, folder)["train"]
    assert train[:] == {"question": ["007", "12"], "a": ["1", "NA"], "b": ["2.50", "-4"], "answer": [0, 1]}
    train = load_splits(choose_task("custom", kind="seq2seq", **options), folder)["train"]
    assert list(train["answer"]) == ["0", "1"]


def test_a_test_split_without_labels_is_left_alone(tmp_path):
    rows = [{"sentence": "a", "label": label} for label in (0, 1)]
    for number, test in enumerate(([{"sentence": "a"}], [{"sentence": "a", "label": None}])):
        folder = write(tmp_path / str(number), train=rows, validation=rows, test=test)
        assert list(load_splits(get_task("cola"), folder)) == ["train", "validation"]
    pairs = made.make(made.translation, 2, 0)
    folder = write(tmp_path / "wmt", train=pairs, validation=pairs, test=[{"translation": {"en": "red"}}])
    assert list(load_splits(get_task("wmt16-en-ro"), folder)) == ["train", "validation"]


def test_the_end_of_text_stands_in_for_padding(tmp_path):
    tokenizer = made.word_pieces(made.TEXTS, 200)
    tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    tokenizer.save_pretrained(tmp_path)
    config = hf.GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=8, n_layer=1, n_head=1, pad_token_id=0)
    hf.GPT2Model(config).save_pretrained(tmp_path)
    rows = [{"sentence": text, "label": 1} for text in ("red", "the red one went far")]
    network, labelled, kind = one_batch(get_task("cola"), tmp_path, rows)
    assert kind.tokenizer.pad_token == "[SEP]"
    assert network.config.pad_token_id == kind.tokenizer.eos_token_id
    assert labelled.batches[0]["input_ids"][0, -1] == kind.tokenizer.eos_token_id
    together = predict(network, labelled, kind).records
    alone = predict(network, in_order(kind.encode(rows_of(*rows)), 1, kind, torch.device("cpu")), kind).records
    assert together[0]["logits"] == pytest.approx(alone[0]["logits"], abs=1e-5)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="to have a tokenizer with a padding token that fits its embeddings, got"):
        load_model(get_task("cola"), str(tmp_path))


def test_a_model_without_a_table_of_embeddings(bert, monkeypatch):
    def none(self):
        raise NotImplementedError

    monkeypatch.setattr(hf.BertForSequenceClassification, "get_input_embeddings", none)
    assert load_model(get_task("cola"), str(bert))[0].config.num_labels == 2
