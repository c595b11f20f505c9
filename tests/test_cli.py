"""The command line: help, lists, copies, and a sentence for each kind of bad input."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from attnreg.experiments.results.document import Table, print_table
from tests.commands import assert_sentence, ran

ROOT = Path(__file__).parent.parent
QUICK = ["--epochs", 1, "--train-size", 64, "--device", "cpu"]


def rows(count=8, **changes):
    return [{"sentence": f"word {i}", "label": i % 2, "idx": i, **changes} for i in range(count)]


def write_split(folder, split, data, suffix=".jsonl"):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" if isinstance(row, dict) else row + "\n" for row in data)
    path = folder / f"{split}{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    return path


@pytest.fixture
def data(tmp_path):
    """A folder of tiny data in CoLA's columns."""
    for split in ("train", "validation"):
        write_split(tmp_path / "data", split, rows())
    return tmp_path / "data"


@pytest.fixture(scope="session")
def without_attention(tmp_path_factory):
    """A saved model that has no attention: FNet mixes tokens by a Fourier transform."""
    folder = tmp_path_factory.mktemp("fnet")
    config = hf.FNetConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, intermediate_size=8, max_position_embeddings=64,
                           pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    hf.FNetForSequenceClassification(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "word": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["list", "recipes"],
        ["list", "tasks"],
        ["recipe", "attendout", "--help"],
        ["recipe", "--help"],
        ["compare", "--help"],
        ["plot", "--help"],
        ["evaluate", "--help"],
    ],
)
def test_help_and_lists_do_not_wait_for_torch(args):
    code = (
        "import sys; from attnreg.experiments.cli.main import main\n"
        f"main({args!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_importing_the_package_does_not_import_torch():
    subprocess.run([sys.executable, "-c", "import attnreg, sys; assert 'torch' not in sys.modules"], check=True)


def test_a_checkout_runs_its_own_recipes_beside_another_one_that_is_installed(tmp_path):
    for folder in ("attnreg", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "recipes" / "finetune.py"
    file.write_text(file.read_text().replace("Plain fine-tuning", "Changed fine-tuning"))
    file.rename(file.with_name("tuned.py"))
    for args in (["list", "recipes"], ["recipe", "tuned", "--help"]):
        command = [sys.executable, "-m", "attnreg", *args]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True)
        assert "Changed fine-tuning" in done.stdout


def test_lists_are_complete(cli):
    from attnreg.experiments.tasks import TASKS
    from attnreg.regularizer.saving import built_in

    recipes = [path.stem.replace("_", "-") for path in (ROOT / "recipes").glob("[a-z]*.py")]
    for what, names in (
        ("recipes", recipes),
        ("tasks", TASKS),
        ("providers", {*built_in()} - {"Compose", "HiddenProvider"}),
    ):
        lines = cli("list", what).output.splitlines()
        assert {line.split()[0] for line in lines} == {*names}
        assert all(len(line.split()) > 3 for line in lines)


def test_every_command_ends_with_an_example(cli):
    for args in ([], ["recipe"], ["list"], ["copy"], ["compare"], ["plot"], ["evaluate"], *(["recipe", line.split()[0]] for line in cli("list", "recipes").output.splitlines())):  # fmt: skip
        assert "Example" in cli(*args, "--help").output, args


def test_a_copied_recipe_runs(cli, tmp_path):
    assert cli("copy", "finetune", "mine.py").exit_code == 0
    text = (tmp_path / "mine.py").read_text().replace('@recipe("finetune")', '@recipe("mine")')
    (tmp_path / "mine.py").write_text(text)
    ran(cli("recipe", "mine.py", *QUICK))
    assert json.loads((tmp_path / "runs/mine-agreement-seed0/config.json").read_text())["recipe"] == "mine"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: write_split(d, "train", [{"text": "a", "label": 0}]), "Missing columns in split train of .*: sentence. Task .* needs sentence, label; the data has 'text', 'label'"),
        (lambda d: write_split(d, "train", [{"sentence": "a", "labels": 0}]), "Missing columns in split train of .*: label. Task .* has 'sentence', 'labels'. Did you mean labels\\?$"),
        (lambda d: write_split(d, "train", rows(label=2)), r"Expected labels 0 \(unacceptable\), 1 \(acceptable\), got 2 in row 1 of split train"),
        (lambda d: write_split(d, "validation", rows(label="yes")), "got 'yes' in row 1 of split validation"),
        (lambda d: write_split(d, "train", rows(sentence=3)), "Expected text in column sentence, got 3 in row 1"),
        (lambda d: write_split(d, "train", rows(sentence=None)), "Expected text in column sentence, got None in row 1"),
        (lambda d: write_split(d, "train", []), "train.jsonl is empty"),
        (lambda d: write_split(d, "train", [*rows(3), '{"sentence": "a", "label'], ), r"Line 4 of .*train.jsonl must be one JSON object, but cannot be read"),
        (lambda d: write_split(d, "train", [*rows(3), "[1, 2]"]), r"Line 4 of .*train.jsonl must be one JSON object, got '\[1, 2\]'"),
        (lambda d: (d / "train.jsonl").unlink(), r"No train file in .*, which has validation.jsonl: add train\.\* \(\.jsonl, "),
        (lambda d: write_split(d, "train", rows(), ".jsonl.gz"), " has split train several times, train.jsonl, train.jsonl.gz: keep one file"),
        (lambda d: (d / "train.jsonl").rename(d / "train.jsonl.gz"), "train.jsonl.gz"),
        (lambda d: (d / "train.jsonl").rename(d / "train.parquet"), "Cannot read .*train.parquet as .parquet"),
        (lambda d: [(d / "train.jsonl").unlink(), (d / "train.csv").write_text("sentence,label\n")], "train.csv has no rows"),
    ],
)  # fmt: skip
def test_bad_data_names_the_file_and_the_place(cli, tmp_path, data, damage, says):
    damage(data)
    assert_sentence(cli("recipe", "finetune", "--data-dir", data, *QUICK), 1, says)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("recipe", [["attention-layerdrop"], ["attendout", "--round-steps", 1, "--game", 1]], ids=["attention-layerdrop", "attendout"])  # fmt: skip
def test_a_model_without_attention(cli, data, without_attention, recipe):
    result = cli("recipe", *recipe, "--data-dir", data, "--model", without_attention, "--max-length", 16, "--epochs", 2)
    assert_sentence(result, 1, "No attention that can be masked was found in FNetForSequenceClassification: ")


def test_a_model_folder_that_holds_none(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_sentence(
        cli("recipe", "finetune", "--model", "./empty"), 1, r"the folder of a model, got \./empty, without config\.json"
    )


def test_an_output_folder_that_holds_something_is_left_alone(cli, tmp_path):
    first = ["recipe", "finetune", *QUICK, "--output-dir", "out"]
    assert cli(*first).exit_code == 0
    before = {path: path.read_bytes() for path in sorted((tmp_path / "out").rglob("*")) if path.is_file()}
    assert_sentence(cli(*first), 1, "Expected --output-dir to be new or empty, got out: .* pass --resume")
    says = (
        r"got out: its run is finished, with other options, --seed 0 \(not --seed 1\); pass --output-dir for this one"
    )
    assert_sentence(cli(*first, "--seed", 1), 1, says)
    (tmp_path / "file").write_text("x")
    assert_sentence(cli(*first[:-1], "file"), 1, "Expected --output-dir to be new or empty")
    assert_sentence(cli(*first, "--resume", "--seed", 1), 1, r"resume with --seed 0 \(not --seed 1\)")
    assert_sentence(cli(*first[:3], 2, *first[4:], "--resume"), 1, r"resume with --epochs 1 \(not --epochs 2\)")
    assert_sentence(
        cli(*first, "--resume", "--train-size", 9), 1, r"resume with --train-size 64 \(not --train-size 9\)"
    )
    held_out = cli(*first, "--resume", "--validation-rows", 9)
    assert_sentence(held_out, 1, r"resume with no --validation-rows \(not --validation-rows 9\)")
    left_out = cli("recipe", "finetune", "--epochs", 1, "--output-dir", "out", "--resume")
    assert_sentence(left_out, 1, r"resume with --train-size 64 \(not given\)")
    other = ["recipe", "attention-layerdrop", *QUICK, "--output-dir", "out", "--resume"]
    assert_sentence(cli(*other), 1, "--recipe finetune")
    (tmp_path / "out" / "result.json").unlink()
    before = {path: text for path, text in before.items() if path.name != "result.json"}
    assert_sentence(cli(*first, "--resume"), 1, "No checkpoint in out/checkpoints, although the run has evaluations")
    assert before == {path: path.read_bytes() for path in sorted((tmp_path / "out").rglob("*")) if path.is_file()}


def test_a_recipe_file_that_cannot_be_imported(cli, tmp_path):
    (tmp_path / "mine.py").write_text("import nothing_of_that_name")
    assert_sentence(cli("recipe", "mine.py"), 1, "Cannot import the recipe in mine.py: ModuleNotFoundError")
    (tmp_path / "mine.py").write_text("x = 1")
    assert_sentence(
        cli("recipe", "mine.py"), 1, "mine.py must define exactly one function under `@attnreg.experiments.recipe"
    )


WITHOUT_NETWORK = """
import os, socket, time
from attnreg.experiments.cli.main import main

os.environ.pop("HF_HUB_OFFLINE", None)
tried, connect = [], socket.socket.connect
socket.socket.connect = lambda self, address: (tried.append(address), connect(self, address))
time.sleep = lambda seconds: tried.append(seconds)
try:
    main(["recipe", "attendout", "--task", "cola"])
finally:
    print("tried", tried)
"""


def test_without_a_network_the_answer_comes_soon(warm, tmp_path):
    code, output = warm.run("-c", WITHOUT_NETWORK, cwd=tmp_path, timeout=60)
    assert code == 1
    assert "(cola) for task 'cola' is not in the local cache: use --data-dir" in output
    # Once, and without waiting: left alone, the libraries try again for 23 seconds.
    assert output.endswith("tried [('127.0.0.1', 9)]\n")


def test_names_in_printed_tables_are_whole():
    out = io.StringIO()
    rows = [["high - plain", f"agreement-train_size={size}", "[-0.0581, +0.0362]"] for size in (200, 400)]
    table = Table(["difference of", "task", "95 % over seeds"], rows, texts=(0, 1))
    print_table(Console(file=out, width=44), table)
    cells = [line.split("│")[2].strip() for line in out.getvalue().splitlines() if line.startswith("│")]
    assert "".join(cells) == "agreement-train_size=200agreement-train_size=400"


def test_in_a_notebook_there_is_no_progress_bar(cli, monkeypatch):
    from rich.console import Console

    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # so that it is restored
    monkeypatch.delenv("TTY_COMPATIBLE")
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    ran(cli("list", "tasks"))
    with Path("/dev/ptmx").open() as terminal:
        assert terminal.isatty()
        assert not Console(file=terminal).is_terminal
