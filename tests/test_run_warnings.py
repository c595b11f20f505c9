"""Warnings of data and of training that is probably not meant: on stderr, and in the report."""

import json
import re
from dataclasses import replace

import pytest
from datasets import Dataset
from rich.console import Console

from attnreg.experiments.results.document import say
from attnreg.experiments.runs.telemetry import growing_loss
from attnreg.experiments.setup.data_checks import data_warnings, shared_rows, unknown_tokens
from attnreg.experiments.tasks import get_task, load_model
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import Kind
from tests import task_data as made
from tests.commands import assert_sentence, ran

LABELS = ["entailment", "neutral", "contradiction"]


@pytest.fixture
def home(tmp_path):
    made.tiny_bert(tmp_path / "bert")
    return tmp_path


def warned(result, folder="out"):
    """The warnings of a run, which the report repeats."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("Warning: ")]
    report = (folder / "report.md").read_text().split("\n")
    assert all(line in report for line in lines)
    assert sum(line.startswith("Warning: ") for line in report) == len(lines)
    return [line.removeprefix("Warning: ") for line in lines]


def run(cli, home, *options, task="mnli", recipe="finetune"):
    args = ["--data-dir", "data", "--model", "bert", "--epochs", 1, "--max-length", 32, "--device", "cpu", *options]
    return warned(ran(cli("recipe", recipe, "--task", task, *args, "--output-dir", "out")), home / "out")


def pairs(count, words=3, labels=LABELS, start=0):
    return [
        {"premise": " ".join(["red"] * words), "hypothesis": f"one {number}", "label": labels[number % len(labels)]}
        for number in range(start, start + count)
    ]


def test_data_with_nothing_wrong_gives_no_warning(cli, home):
    made.write_splits(home / "data", train=pairs(12), validation=pairs(6, start=20))
    assert run(cli, home) == []


def test_dev_rows_that_are_in_train(cli, home):
    made.write_splits(home / "data", train=pairs(12), validation=[*pairs(2, start=10), *pairs(3, start=20)])
    assert run(cli, home) == [
        "2 of 5 dev rows are also in train (same texts), so the score is too high: remove such rows from train."
    ]
    train, dev = (Dataset.from_dict({"sentence": texts}) for texts in (["a", "b"], ["b", "c"]))
    assert next(shared_rows(get_task("cola"), train, dev)).startswith("1 of 2 dev rows is also in train")


def test_classes_that_no_training_row_has(cli, home):
    made.write_splits(home / "data", train=pairs(12, labels=LABELS[:2]), validation=pairs(6, start=20))
    assert run(cli, home) == ["no training row has the class contradiction: raise --train-size, or add such rows."]
    (home / "out").rename(home / "before")
    (warning,) = run(cli, home, "--train-size", 1)
    assert warning.startswith("all training rows have the class ")
    assert warning.endswith(", so there is nothing to learn.")


def test_a_class_that_may_be_a_typing_error(cli, home):
    rows = [{"text": f"red {made.WORDS[n % 12]} {n}", "label": ["good", "bad"][n % 2]} for n in range(60)]
    made.write_splits(home / "data", train=[*rows[:40], {"text": "a", "label": "goood"}], validation=rows[40:])
    warnings = run(cli, home, "--text-columns", "text", task="custom")
    assert warnings == ["class 'goood' has 1 of 41 training rows and none in dev. Did you mean good?"]
    predicted = [json.loads(line)["prediction"] for line in (home / "out/predictions.jsonl").read_text().splitlines()]
    said = "Collapsed: the network predicts the same class for all dev rows." in (home / "out/report.md").read_text()
    assert said == (len({*predicted}) == 1)


def test_tags_that_no_training_row_has(cli, home):
    rows = [{"tokens": ["Anna", "went", made.WORDS[number]], "ner_tags": ["B-PER", "O", "O"]} for number in range(8)]
    made.write_splits(home / "data", train=rows[:6], validation=rows[6:])
    (warning,) = run(cli, home, task="conll2003")
    assert warning == (
        "no training row has the classes I-PER, B-ORG, I-ORG, B-LOC, I-LOC and 2 more: raise --train-size, or add such rows."
    )


def test_a_kind_of_ones_own_is_not_warned_of_classes():
    class Several(Kind):
        has_classes = True

        def gold(self, rows, place="the data"):
            return [[float(name in row) for name in self.task.labels] for row in rows["label"]]

        def answers(self, network, batch, output):
            return []

    task, tokenizer = replace(get_task("agreement"), labels=("a", "b", "c")), load_model(get_task("agreement"))[1]
    rows = Dataset.from_dict({"sentence": ["the boy", "the dog", "the man"], "label": [["a"], ["a", "c"], ["b"]]})
    assert not list(data_warnings(Several(task, tokenizer, 32), rows.select([0, 1]), rows.select([2])))


def test_inputs_that_are_cut(cli, home):
    made.write_splits(home / "data", train=[*pairs(9), *pairs(2, words=40, start=9)], validation=pairs(6, start=20))
    assert run(cli, home) == []  # 2 of 11 are less than a fifth
    (home / "out").rename(home / "before")
    made.write_rows(home / "data" / "train.jsonl", [*pairs(9), *pairs(3, words=40, start=9)])
    (warning,) = run(cli, home)
    longest = 1 + 40 + 1 + 2 + 1  # "one 9", and special tokens
    assert warning == f"3 of 12 training inputs (25%) are cut by --max-length 32; the longest has {longest} tokens."


def test_classes_that_are_probably_one(cli, home):
    rows = [{"text": f"red {word}", "label": ["yes", "no", "Yes "][i % 3]} for i, word in enumerate(made.WORDS[:9])]
    made.write_splits(
        home / "data", train=[{"text": " ", "label": "no"}, *rows], validation=[{"text": "blue", "label": "no"}]
    )
    assert run(cli, home, "--text-columns", "text", task="custom") == [
        "the classes 'Yes ' and 'yes' differ only in case or spaces: spell classes alike in all rows.",
        "1 of 10 training rows has no text in text: remove or fill them.",
    ]


def test_tokens_that_the_tokenizer_does_not_know(cli, home):
    texts = ["ρόδα red", "κάππα 7 one", "red one two"]  # 3 of 8 tokens: words of other letters, and a digit
    rows = [{"sentence": text, "label": i % 2} for i, text in enumerate(texts)]
    made.write_splits(home / "data", train=rows, validation=[{"sentence": "far", "label": 1}])
    (warning,) = run(cli, home, task="cola")
    assert warning == (
        "38% of the tokens in the training inputs are unknown to the tokenizer ([UNK]): check that the tokenizer belongs "
        "to the model and fits the language of your texts."
    )
    made.write_rows(home / "new.jsonl", [{"sentence": "ρόδα", "label": 1}, {"sentence": "κάππα", "label": 0}])
    result = ran(cli("evaluate", "out", "--data-dir", "new.jsonl", "--device", "cpu"))
    assert "Warning: 100% of the tokens in the validation inputs of new.jsonl are unknown to the" in result.stderr


def test_a_look_at_tokens_leaves_the_tokenizer_as_it_was():
    task = get_task("agreement")
    tokenizer = load_model(task)[1]
    kind = kind_class(task.kind)(task, tokenizer, 4)
    assert not list(unknown_tokens(kind, Dataset.from_dict({"sentence": ["the boy sleeps today"], "label": [1]})))
    assert tokenizer.backend_tokenizer.truncation is None


def test_choices_that_are_probably_counted_from_one(cli, home):
    rows = [{"q": "red", "a": "one", "b": "two", "c": "", "label": 1 + number % 2} for number in range(4)]
    made.write_splits(home / "data", train=rows, validation=[{**rows[0], "q": "blue"}])
    options = ["--kind", "multiple-choice", "--text-columns", "q", "--choice-columns", "a,b,c"]
    assert run(cli, home, *options, task="custom") == [
        "the first choice is right in no training row: numbers of choices count from 0, not from 1.",
        "4 of 4 training rows have a choice without text: remove or fill them.",
    ]


def test_a_baseline_does_not_repeat_the_warnings(cli, home):
    made.write_splits(home / "data", train=pairs(40, labels=LABELS[:2]), validation=pairs(6, start=50))
    game = ["--batch-size", 4, "--round-steps", 1, "--epochs", 2, "--game", 1]
    given = run(cli, home, *game, recipe="attendout")
    assert sum(warning.startswith("no training row has the class") for warning in given) == 1


def test_a_loss_that_only_grows(cli, tmp_path):
    args = ["--train-size", 64, "--epochs", 3, "--learning-rate", 1, "--schedule", "constant", "--device", "cpu"]
    result = ran(cli("recipe", "finetune", *args, "--output-dir", "out"))
    [warning] = re.findall(r"Warning: (the training loss grew .*)", (tmp_path / "out/report.md").read_text())
    assert " ".join(result.output.split()).count(warning) == 1
    grew = r"the training loss grew from \d\.\d{4} \(mean up to epoch 1\) to \d+\.\d{4} \(up to epoch 3\): "
    assert re.fullmatch(grew + "lower --learning-rate, unless the regularizer became stronger.", warning)


@pytest.mark.parametrize(
    ("losses", "grew"),
    [([0.7, 0.8, 0.9], True), ([0.7, 0.9, 0.8], True), ([0.7, 0.6, 0.9], False), ([0.7, 0.9], False), ([0.7], False)],
)
def test_a_loss_grew_if_no_epoch_is_as_good_as_the_first(losses, grew):
    lines = [{"step": 5 * number, "loss": loss} for number, loss in enumerate(losses, 1)]
    evaluations = [{"epoch": number, "step": 5 * number} for number in range(1, len(losses) + 1)]
    assert (growing_loss(lines, evaluations) is not None) == grew
    alternating = [{**record, "drop_rate": {"encoder.0": 0.1} if number % 2 else {}} for number, record in enumerate(evaluations)]  # fmt: skip
    assert growing_loss(lines, alternating) is None
    # A mean over more steps counts for more, and lines within an epoch belong to it.
    lines = [{"step": 1, "loss": 9.0}, {"step": 10, "loss": 1.0}, {"step": 20, "loss": 1.7}]
    assert growing_loss(lines, [{"epoch": 1, "step": 10}, {"epoch": 2, "step": 20}]) is None


def test_inputs_that_evaluation_cuts(cli, home):
    made.write_splits(home / "data", train=pairs(9), validation=pairs(6, start=20))
    run(cli, home)
    made.write_rows(home / "long" / "validation.jsonl", pairs(6, words=40, start=20))
    longest = 1 + 40 + 1 + 2 + 1
    cut = f"Warning: 6 of 6 validation inputs of long (100%) are cut by --max-length 32; the longest has {longest} tokens."
    evaluate = ["evaluate", "out", "--device", "cpu"]
    assert cli(*evaluate).stderr == ""
    short = ran(cli(*evaluate, "--data-dir", "long"))
    assert short.stderr == f"{cut}\n"
    whole = ran(cli(*evaluate, "--data-dir", "long", "--max-length", longest))
    assert whole.stderr == ""
    ran(cli(*evaluate, "--data-dir", "long", "--max-length", longest + 1))
    found = [json.loads(path.read_text()) for path in sorted((home / "out" / "evaluations").glob("mnli-long*.json"))]
    losses = {each["max_length"]: each["metrics"]["loss"] for each in found}
    assert losses.keys() == {32, longest, longest + 1}  # none replaces another
    assert losses[32] != losses[longest] == pytest.approx(losses[longest + 1])
    refused = cli(*evaluate, "--data-dir", "long", "--max-length", 1000)
    assert_sentence(refused, 1, r"Expected --max-length of at most \d+ for this model, got 1000")


def test_inputs_are_as_long_as_the_model_takes(cli, tmp_path):
    made.write(tmp_path / "data", train=24, validation=16)
    made.tiny_bert(tmp_path / "bert")
    words = ["--task", "mnli", "--data-dir", "data", "--model", "bert", "--epochs", 1, "--device", "cpu"]
    result = ran(cli("recipe", "finetune", *words, "--output-dir", "out"))
    assert "Inputs have at most 64 tokens, which is what the model takes (--max-length)." in result.output
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["max_length"], config["default_max_length"]) == (64, True)
    ran(cli("recipe", "finetune", *words, "--output-dir", "out", "--resume"))
    ran(cli("recipe", "finetune", *words, "--output-dir", "out", "--resume", "--max-length", 64))
    assert_sentence(
        cli("recipe", "finetune", *words, "--output-dir", "out", "--resume", "--max-length", 63),
        1,
        r"started with other options: resume with --max-length 64 \(not --max-length 63\)",
    )
    ran(cli("evaluate", "out"))


def test_mistakes_in_the_data_are_said_before_those_of_the_folder(cli, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("")
    words = ["--task", "custom", "--text-columns", "words", "--output-dir", "out"]
    made.write(tmp_path / "data", train=24, validation=16)
    assert_sentence(cli("recipe", "finetune", *words, "--data-dir", "data"), 1, "words")
    words[3] = "premise,hypothesis"
    assert_sentence(cli("recipe", "finetune", *words, "--data-dir", "data"), 1, "--output-dir to be new or empty")


def test_words_in_brackets_are_no_markup(capsys):
    say(Console(width=40), "no [bold] here, nor [cls]")
    assert capsys.readouterr().out == "no [bold] here, nor [cls]\n"
