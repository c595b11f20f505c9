"""Warnings of data and of training that is probably not meant: on stderr, and in the report."""

import json
from dataclasses import replace

import pytest
import transformers as hf
from datasets import Dataset
from rich.console import Console

from attnreg.experiments.results.document import say
from attnreg.experiments.setup.rows import data_warnings
from attnreg.experiments.tasks import choose_task, get_task, load_data, load_model
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import Kind
from tests.helpers import task_data as made
from tests.helpers.commands import assert_sentence, ran

LABELS = ["entailment", "neutral", "contradiction"]
LONGEST = 1 + 40 + 1 + 2 + 1  # of 40 words, "one 9" and special tokens


@pytest.fixture
def home(tmp_path):
    made.tiny_bert(tmp_path / "bert")
    return tmp_path


def pairs(count, words=3, labels=LABELS, start=0):
    return [
        {"premise": " ".join(["red"] * words), "hypothesis": f"one {number}", "label": labels[number % len(labels)]}
        for number in range(start, start + count)
    ]


CLASSES = [{"text": f"red {made.WORDS[n % 12]} {n}", "label": ["good", "bad"][n % 2]} for n in range(60)]
TAGS = [{"tokens": ["Anna", "went", made.WORDS[number]], "ner_tags": ["B-PER", "O", "O"]} for number in range(8)]
# 3 of 8 tokens: words of other letters, and a digit
UNKNOWN = [{"sentence": each, "label": i % 2} for i, each in enumerate(["ρόδα red", "κάππα 7 one", "red one two"])]
CHOICES = [{"q": "red", "a": "one", "b": "two", "c": "", "label": 1 + number % 2} for number in range(4)]
OF_CHOICES = {"kind": "multiple-choice", "text_columns": "q", "choice_columns": "a,b,c"}
OF_TEXT = {"text_columns": "text"}
UNREAD = (
    "100% of the tokens in the training inputs are unknown to the tokenizer ([UNK]): check that the tokenizer belongs "
    "to the model and fits the language of your texts."
)
ABSENT = "raise --train-size, or add such rows."


@pytest.mark.parametrize(
    ("train", "dev", "task", "options", "expected"),
    [
        (pairs(12), pairs(6, start=20), "mnli", {}, []),
        (pairs(12), [*pairs(2, start=10), *pairs(3, start=20)], "mnli", {},
         ["2 of 5 dev rows are also in train (same texts), so the score is too high: remove such rows from train."]),
        (pairs(12), [*pairs(1, start=10), *pairs(3, start=20)], "mnli", {},
         ["1 of 4 dev rows is also in train (same texts), so the score is too high: remove such rows from train."]),
        (pairs(12, labels=LABELS[:2]), pairs(6, start=20), "mnli", {},
         [f"no training row has the class contradiction: {ABSENT}"]),
        (pairs(1), pairs(6, start=20), "mnli", {},
         ["all training rows have the class entailment, so there is nothing to learn."]),
        ([*CLASSES[:40], {"text": "a", "label": "goood"}], CLASSES[40:], "custom", OF_TEXT,
         ["class 'goood' has 1 of 41 training rows and none in dev. Did you mean good?"]),
        ([*CLASSES[:40], {"text": "a", "label": "Good "}, {"text": "", "label": "bad"}], CLASSES[40:], "custom", OF_TEXT,
         ["row 42 of train has no text: remove it.",
          "classes 'Good ', 'good' differ only in case or spaces: spell a class alike in all rows.",
          "class 'Good ' has 1 of 42 training rows and none in dev. Did you mean good?"]),
        ([*CLASSES[:12], {"text": "red one", "label": "bad"}, {"text": "red one", "label": "good"}], CLASSES[40:], "custom", OF_TEXT,
         ["1 training text has several labels in different rows, such as 'red one' with bad and good: correct them."]),
        ([*CLASSES[:12], {"text": "a", "label": "label"}], CLASSES[40:], "custom", OF_TEXT,
         ["class 'label' has 1 of 13 training rows and none in dev."]),
        ([{**row, "text": text} for row, text in zip(CLASSES[:11], ["", "a", " ", "b", "", *"cdefgh"], strict=True)], [*CLASSES[40:], {"text": "", "label": "bad"}], "custom", OF_TEXT,
         ["1 of 21 dev rows is also in train (same texts), so the score is too high: remove such rows from train.",
          "rows 1, 3, 5 of train have no text: remove them.", "row 21 of dev has no text: remove it."]),
        ([{**row, "text": str(n)} for n, row in enumerate(CLASSES[:8])], CLASSES[40:], "custom", OF_TEXT,
         ["text column text holds a number in every row and no text: check --text-columns.", UNREAD]),
        (CLASSES[:40], [row for row in CLASSES[40:] if row["label"] == "bad"], "custom", OF_TEXT,
         ["all 10 dev rows have the label 'bad', so scores say little."]),
        (TAGS[:6], TAGS[6:], "conll2003", {},
         [f"no training row has the classes I-PER, B-ORG, I-ORG, B-LOC, I-LOC and 2 more: {ABSENT}"]),
        ([*pairs(9), *pairs(2, words=40, start=9)], pairs(6, start=20), "mnli", {}, []),  # less than a fifth
        ([*pairs(9), *pairs(3, words=40, start=9)], pairs(6, start=20), "mnli", {},
         [f"3 of 12 training inputs (25%) are cut by --max-length 32; the longest has {LONGEST} tokens."]),
        ([{"translation": {"en": "red " * n, "ro": "blue " * (34 * n)}} for n in (1, 2)], [{"translation": {"en": "a", "ro": "b"}}], "wmt16-en-ro", {},
         ["2 of 2 training inputs (100%) are cut by --max-length 32; the longest has 70 tokens."]),
        (UNKNOWN, [{"sentence": "far", "label": 1}], "cola", {},
         ["38% of the tokens in the training inputs are unknown to the tokenizer ([UNK]): check that the tokenizer "
          "belongs to the model and fits the language of your texts."]),
        (CHOICES, [{**CHOICES[0], "q": "blue"}], "custom", OF_CHOICES,
         ["the first choice is right in no training row: numbers of choices count from 0, not from 1."]),
    ],
)  # fmt: skip
def test_probable_mistakes_in_the_data_are_one_sentence_each(home, train, dev, task, options, expected):
    made.write_splits(home / "data", train=train, validation=dev)
    chosen, splits = load_data(choose_task(task, **options), home / "data")
    kind = kind_class(chosen.kind)(chosen, hf.AutoTokenizer.from_pretrained(home / "bert"), 32)
    before = kind.tokenizer.backend_tokenizer.truncation
    assert list(data_warnings(kind, splits["train"], splits["validation"])) == expected
    assert kind.tokenizer.backend_tokenizer.truncation == before  # the model is saved with it


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


def run(cli, recipe, *options):
    words = ["--task", "mnli", "--data-dir", "data", "--model", "bert", "--epochs", 1, "--device", "cpu", *options]
    return cli("recipe", recipe, *words, "--output-dir", "out")


def test_a_run_warns_on_stderr_and_in_its_report_and_its_baseline_does_not_repeat_it(cli, home):
    made.write_splits(home / "data", train=pairs(40, labels=LABELS[:2]), validation=pairs(6, start=50))
    result = ran(run(cli, "attendout", "--batch-size", 4, "--round-steps", 1, "--epochs", 2, "--game", 1))
    report = (home / "out/report.md").read_text().splitlines()
    warnings = [line for line in result.stderr.splitlines() if line.startswith("Warning: ")]
    assert sorted(warnings) == sorted(line for line in report if line.startswith("Warning: "))
    assert sum("no training row has the class" in line for line in warnings) == 1
    predicted = [json.loads(line)["prediction"] for line in (home / "out/predictions.jsonl").read_text().splitlines()]
    said = "Collapsed: the network predicts the same class for all scored rows." in report
    assert said == (len({*predicted}) == 1)


def test_inputs_that_evaluation_cuts(cli, home):
    made.write_splits(home / "data", train=pairs(9), validation=pairs(6, start=20))
    ran(run(cli, "finetune", "--max-length", 32))
    made.write_rows(home / "long" / "validation.jsonl", pairs(6, words=40, start=20))
    cut = f"Warning: 6 of 6 validation inputs of long (100%) are cut by --max-length 32; the longest has {LONGEST} tokens."
    evaluate = ["evaluate", "out", "--device", "cpu"]
    assert cli(*evaluate).stderr == ""
    short = ran(cli(*evaluate, "--data-dir", "long"))
    assert short.stderr == f"{cut}\n"
    whole = ran(cli(*evaluate, "--data-dir", "long", "--max-length", LONGEST))
    assert whole.stderr == ""
    ran(cli(*evaluate, "--data-dir", "long", "--max-length", LONGEST + 1))
    found = [json.loads(path.read_text()) for path in sorted((home / "out" / "evaluations").glob("mnli-long*.json"))]
    losses = {each["max_length"]: each["metrics"]["loss"] for each in found}
    assert losses.keys() == {32, LONGEST, LONGEST + 1}  # none replaces another
    assert losses[32] != losses[LONGEST] == pytest.approx(losses[LONGEST + 1])
    refused = cli(*evaluate, "--data-dir", "long", "--max-length", 1000)
    assert_sentence(refused, 1, r"Expected --max-length of at most \d+ for this model, got 1000")


def test_inputs_are_as_long_as_the_model_takes(cli, home):
    made.write(home / "data", train=24, validation=16)
    ran(run(cli, "finetune"))
    config = json.loads((home / "out/config.json").read_text())
    assert (config["max_length"], config["default_max_length"]) == (64, True)
    ran(run(cli, "finetune", "--resume"))
    ran(run(cli, "finetune", "--resume", "--max-length", 64))
    says = r"started with other options: repeat it with --max-length 64 \(not --max-length 63\)"
    assert_sentence(run(cli, "finetune", "--resume", "--max-length", 63), 1, says)
    ran(cli("evaluate", "out"))


def test_mistakes_in_the_data_are_said_before_those_of_the_folder(cli, home):
    tmp_path = home
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("")
    words = ["--task", "custom", "--text-columns", "words", "--model", "bert", "--output-dir", "out"]
    made.write(tmp_path / "data", train=24, validation=16)
    assert_sentence(cli("recipe", "finetune", *words, "--data-dir", "data"), 1, "words")
    words[3] = "premise,hypothesis"
    assert_sentence(cli("recipe", "finetune", *words, "--data-dir", "data"), 1, "--output-dir to be new or empty")


def test_words_in_brackets_are_no_markup(capsys):
    say(Console(width=40), "no [bold] here, nor [cls]")
    assert capsys.readouterr().out == "no [bold] here, nor [cls]\n"
