"""Extractive question answering: windows and their labels, the best span of a row, SQuAD's scores, and runs."""

import random
import re

import datasets
import numpy as np
import pytest
import torch
import transformers as hf

import attnreg
from attnreg.attendout.rewards import correctness, negative_loss
from attnreg.attribution import Target
from attnreg.errors import InputError, UsageError
from attnreg.experiments.results.evaluation import predict
from attnreg.experiments.setup.batches import to_score
from attnreg.experiments.tasks import choose_task, load_data, load_model
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.integrations import RegularizedTrainer
from attnreg.training import RDropLoss
from attnreg.training.objective import disagreement
from tests.helpers import task_data as made
from tests.helpers.commands import assert_sentence, ran, read_lines
from tests.helpers.method_cases import step_of_r_drop
from tests.helpers.recipe_cases import assert_evaluated_as_trained

TASK = ["--task", "custom", "--kind", "question-answering", "--device", "cpu", "--batch-size", 8, "--epochs", 2]
SHORT = ["--max-length", 16]


def question(rng, most=10):
    """Which of two names follows a word; some questions have no answer."""
    name, other = rng.sample(list(made.NAMES), 2)
    words = made.words(rng, 3, most)
    cue = rng.choice(["near", "far"])
    text = " ".join([*words, cue, name, "Smith", *made.words(rng, 1, 4), "saw", other])
    answers = {"text": [f"{name} Smith"], "answer_start": [text.index(f" {name} Smith") + 1]}
    return {"id": "x", "question": f"{cue} a", "context": text, "answers": answers}


def unanswered(rng, most=10):
    row = question(rng, most)
    return {**row, "answers": {"text": [], "answer_start": []}} if rng.random() < 0.3 else row


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    return made.tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def loaded(bert):
    task = choose_task("custom", kind="question-answering")
    model, tokenizer = load_model(task, str(bert))
    return task, model.eval(), tokenizer


def kind_of(loaded, max_length=16):
    return kind_class("question-answering")(loaded[0], loaded[2], max_length)


def rows_of(count=20, maker=unanswered, most=10, seed=0):
    rng = random.Random(seed)
    rows = datasets.Dataset.from_list([maker(rng, most) for _ in range(count)])
    kind_class("question-answering")(choose_task("custom", kind="question-answering")).check(rows, "here")
    return rows


@pytest.mark.parametrize("max_length", [12, 16, 48])
def test_windows_hold_the_whole_context_and_point_at_the_answer(loaded, max_length):
    kind, rows = kind_of(loaded, max_length), rows_of()
    tokenizer, encoded = kind.tokenizer, kind.encode(rows)
    seen = {number: set() for number in range(1, 21)}
    before = dict.fromkeys(seen, -1)
    for window in encoded:
        ids, reference = window["input_ids"], window["reference"]
        row = rows[reference["row"] - 1]
        asked = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
        assert len(ids) <= max_length
        assert ids[: len(asked) + 2] == [tokenizer.cls_token_id, *asked, tokenizer.sep_token_id]
        inside = ids[len(asked) + 2 : -1]
        whole = tokenizer(row["context"], add_special_tokens=False)["input_ids"]
        starts = range(before[reference["row"]] + 1, len(whole))
        at = before[reference["row"]] = next(i for i in starts if whole[i : i + len(inside)] == inside)
        seen[reference["row"]].update(range(at, at + len(inside)))
        span = ids[window["start_positions"] : window["end_positions"] + 1]
        text = row["answers"]["text"]
        wanted = tokenizer(text[0], add_special_tokens=False)["input_ids"] if text else []
        holds = bool(text) and any(inside[i : i + len(wanted)] == wanted for i in range(len(inside)))
        assert span == (wanted if holds else [tokenizer.cls_token_id])
    for number, row in enumerate(rows, 1):
        assert seen[number] == set(range(len(tokenizer(row["context"], add_special_tokens=False)["input_ids"])))


def test_rows_whose_answer_no_window_holds_are_scored_but_not_trained_on(loaded):
    kind = kind_of(loaded, 12)
    text = " ".join(["red blue"] * 12)
    long = {"question": "a", "context": text, "answers": {"text": [text], "answer_start": [0]}}
    short = {"question": "a", "context": text, "answers": {"text": ["red blue"], "answer_start": [0]}}
    encoded = kind.encode(datasets.Dataset.from_list([long, short]))
    assert {each["row"] for each in encoded["reference"]} == {1, 2}
    assert {each["row"] for each in kind.to_train_on(encoded)["reference"]} == {2}
    with pytest.raises(InputError, match=r"None of .* rows has its first answer within a window of --max-length"):
        kind.to_train_on(kind.encode(datasets.Dataset.from_list([long])))
    counts = [each["row"] for each in encoded["reference"]]
    assert kind.divided(encoded, len(counts) - 1) == counts.index(2)


def test_answers_are_the_best_spans_of_all_windows(loaded):
    kind, rows = kind_of(loaded, 16), rows_of(30, most=14)
    encoded, noise = kind.encode(rows), np.random.default_rng(0)
    assert len(encoded) > 40
    logits = [noise.normal(size=(2, len(window["input_ids"]))).round(3) for window in encoded]
    records = kind.records([tuple(each) for each in logits], encoded["reference"][:])
    assert len(records) == 30
    found = [[] for _ in records]
    for (start, end), window in zip(logits, encoded, strict=True):
        ids = window["input_ids"]
        places = list(range(ids.index(kind.tokenizer.sep_token_id) + 1, len(ids) - 1))
        spans = [(start[i] + end[j], tuple(ids[i : j + 1])) for i in places for j in places if i <= j < i + 30]
        found[window["reference"]["row"] - 1].append((max(spans), start[0] + end[0]))
    empty = 0
    for record, windows, row in zip(records, found, rows, strict=True):
        (score, ids), null = max(span for span, _ in windows), min(null for _, null in windows)
        assert record["label"] == row["answers"]["text"]
        predicted = kind.tokenizer(record["prediction"], add_special_tokens=False)["input_ids"]
        assert predicted == ([] if null > score else list(ids))
        assert record["prediction"] in row["context"]
        empty += null > score
    answered = [number for number, each in enumerate(encoded["reference"]) if each["answers"]]
    only = kind.records([logits[n] for n in answered], [encoded["reference"][n] for n in answered])
    assert all(record["prediction"] for record in only)  # without empty labels, never an empty answer


def slow_words(text):
    kept = "".join(letter for letter in text.lower() if letter not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return [word for word in re.split(r"\s+", kept) if word not in ("", "a", "an", "the")]


def slow_f1(ours, theirs):
    left, common = list(theirs), 0
    for word in ours:
        if word in left:
            left.remove(word)
            common += 1
    if not ours or not theirs:
        return float(ours == theirs)
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall) if common else 0.0


def test_scores_are_those_of_squad(loaded):
    rng = random.Random(0)
    pool = ["The", "cat", "a", "sat,", "U.S.", "us", "an", "mat", "--", "Cat"]

    def text():
        return " ".join(rng.choices(pool, k=rng.randint(0, 4)))

    records = [{"prediction": text(), "label": [text() for _ in range(rng.randint(0, 3))]} for _ in range(300)]
    records += [{"prediction": "b a cat", "label": ["cat b", "b cat"]}]
    exact = f1 = 0.0
    for record in records:
        ours = slow_words(record["prediction"])
        theirs = [slow_words(label) for label in record["label"] or [""]]
        exact += float(ours in theirs)
        f1 += max(slow_f1(ours, each) for each in theirs)
    task = choose_task("custom", kind="question-answering", metric="exact_match")
    scores = kind_class("question-answering")(task, loaded[2], 16).score(records)
    assert scores == pytest.approx({"exact_match": exact / len(records), "answer_f1": f1 / len(records)})


def test_loss_rewards_targets_and_r_drop_take_start_and_end_as_two_classes(loaded, tmp_path):
    _, model, _ = loaded
    kind = kind_of(loaded)
    encoded = kind.encode(rows_of(6))
    batch = kind.collate(list(encoded.remove_columns("reference")))
    with torch.no_grad():
        output = model(**batch)
    log_p = [each.log_softmax(-1) for each in (output.start_logits, output.end_logits)]
    gold = [batch["start_positions"], batch["end_positions"]]
    each = sum(p[torch.arange(len(p)), at] for p, at in zip(log_p, gold, strict=True)) / 2
    assert torch.allclose(negative_loss(model, batch), each, atol=1e-6)
    assert float(output.loss) == pytest.approx(-float(each.mean()), abs=1e-6)
    right = sum((p.argmax(-1) == at).float() for p, at in zip(log_p, gold, strict=True)) / 2
    assert correctness(model, batch).tolist() == right.tolist()
    best = sum(float(p.max(-1).values.sum()) for p in log_p)
    for name, wanted in (("predicted", best), ("label", 2 * float(each.sum()))):
        target = Target(name).for_model(model)
        assert float(target.score(output, batch, target.classes(output, batch))) == pytest.approx(wanted, abs=1e-4)
    loss, (first, other) = step_of_r_drop(model, batch)
    sides = [torch.stack([each.start_logits, each.end_logits], 1) for each in (first, other)]
    expected = (first.loss + other.loss + 2 * disagreement(*sides, torch.stack(gold, 1))) / 2
    assert loss == pytest.approx(float(expected), abs=1e-6)
    arguments = hf.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = RegularizedTrainer(model, arguments, objective=RDropLoss(2.0))
    torch.manual_seed(1)
    assert float(trainer.compute_loss(model.train(), batch).detach()) == pytest.approx(float(expected), abs=1e-6)
    model.eval()


def test_predictions_do_not_depend_on_the_batch(loaded):
    _, model, _ = loaded
    kind, rows = kind_of(loaded), rows_of(12)
    encoded = kind.encode(rows)
    alone, together = (predict(model, to_score(encoded, size, kind, torch.device("cpu")), kind) for size in (1, 64))
    assert alone.records == together.records
    assert len(alone.records) == 12


@pytest.mark.parametrize("name", ["GPT2", "XLNet", "Bart"])
def test_other_architectures_read_the_same_rows(name, loaded):
    tokenizer = loaded[2]
    tiny = {
        "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
        "XLNet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
        "Bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
                 "max_position_embeddings": 32},
    }[name]  # fmt: skip
    config = getattr(hf, f"{name}Config")(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=3, **tiny)
    model = hf.AutoModelForQuestionAnswering.from_config(config).eval()
    kind = kind_of(loaded)
    encoded = kind.encode(rows_of(4))
    found = predict(model, to_score(encoded, 8, kind, torch.device("cpu")), kind)
    assert len(found.records) == 4
    batch = kind.collate(list(encoded.remove_columns("reference")))
    assert torch.isfinite(negative_loss(model, batch)).all()


ANSWER = {"text": ["red"], "answer_start": [2]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answers": "red"}, r"Expected answers as .* in column answers, got 'red' .*: use .jsonl or .parquet"),
        ({"answers": {"text": ["red"], "answer_start": []}}, r"Expected answers as .*, got .* in row 1 of here"),
        ({"answers": None}, "Expected answers as .*, got None in row 1 of here"),
        ({"answers": {"text": ["red"], "answer_start": [1]}}, "The answer 'red' does not begin at character 1 of "
         "column context, where ' re' is, in row 1 of here: count answer_start in characters from 0"),
        ({"answers": {"text": ["red"], "answer_start": [-3]}}, "does not begin at character -3"),
        ({"answers": {"text": [" "], "answer_start": [1]}}, "An answer is empty: use empty lists"),
        ({"context": 3}, "Expected text in column context, got 3 in row 1 of here"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_one_sentence(change, says):
    rows = datasets.Dataset.from_list([{"question": "a", "context": "a red one", "answers": ANSWER, **change}])
    with pytest.raises(InputError, match=says):
        kind_class("question-answering")(choose_task("custom", kind="question-answering")).check(rows, "here")


def test_what_does_not_fit_is_one_sentence(loaded, tmp_path):
    kind = kind_of(loaded)
    long = {"question": "red " * 20, "context": "a red one", "answers": ANSWER}
    with pytest.raises(InputError, match="--max-length 16 has no room for the context after a question of 20 tokens"):
        kind.encode(datasets.Dataset.from_list([long]))
    one = choose_task("custom", kind="question-answering", text_columns="question", label_column="answers")
    made.write(tmp_path / "data", 4, 4, lambda rng: question(rng))
    with pytest.raises(UsageError, match=r"needs two --text-columns, .* got question"):
        load_data(one, tmp_path / "data")


@pytest.fixture
def args(tmp_path, bert):
    folder = made.write(tmp_path / "data", 40, 12, unanswered)
    return [*TASK, *SHORT, "--data-dir", folder, "--model", bert]


def test_a_run_is_saved_and_evaluated(cli, args, tmp_path, undrawn):
    assert_evaluated_as_trained(cli, tmp_path, args, tmp_path / "data", rows=12)
    assert {*read_lines(tmp_path / "ad-drop" / "predictions.jsonl")[0]} == {"label", "prediction"}
    plain = hf.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "ad-drop" / "model")
    assert plain.config.architectures == ["BertForQuestionAnswering"]


def test_attendout_plays(cli, args, tmp_path):
    game = ["--no-baseline", "--round-steps", 2, "--reward-rows", 8]
    ran(cli("recipe", "attendout", *args, *game, "--rewards", "Rewards(score='accuracy')", "--output-dir", "out"))
    assert any("winner" in line for line in read_lines(tmp_path / "out" / "telemetry.jsonl"))
    result = cli("recipe", "attendout", *args, *game, "--reward-data", "half-dev", "--output-dir", "other")
    assert_sentence(result, 2, "--reward-data half-dev would divide windows of the same question")


def test_a_model_of_another_task_gets_a_head_of_two(tmp_path, bert):
    config = hf.BertConfig.from_pretrained(bert, num_labels=5)
    made.save(tmp_path, hf.BertForSequenceClassification(config), hf.AutoTokenizer.from_pretrained(bert))
    model, _ = load_model(choose_task("custom", kind="question-answering"), str(tmp_path))
    assert model.qa_outputs.out_features == 2
    with attnreg.attach(model, attnreg.DropKey(0.1)) as handle:
        assert len(handle.sites) == 2
