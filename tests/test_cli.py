"""The command line: help, lists, copies, and a sentence for each kind of bad input."""

import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from attnreg.experiments.cli.main import main
from attnreg.experiments.results.document import Heading, Table, html_page, markdown, print_table
from attnreg.experiments.tasks import TASKS
from attnreg.regularizer.saving import built_in
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.repository import ROOT

QUICK = ["--epochs", 1, "--train-size", 64, "--device", "cpu"]


def test_importing_the_package_help_and_lists_do_not_wait_for_torch():
    pages = [[], ["recipe"], ["recipe", "attendout"], ["compare"], ["search"], ["plot"], ["evaluate"]]
    calls = [["list", "recipes"], ["list", "tasks"], ["list", "providers"], *([*page, "--help"] for page in pages)]
    code = (
        "import sys, attnreg; from attnreg.experiments.cli.main import main\n"
        f"for args in {calls!r}:\n"
        "    main(args, standalone_mode=False)\n"
        "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules, args"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


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
    recipes = [path.stem.replace("_", "-") for path in (ROOT / "recipes").glob("[a-z]*.py")]
    studies = [path.stem for path in (ROOT / "recipes" / "studies").glob("*.yaml")]
    providers = {*built_in()} - {"Compose", "HiddenProvider"}
    for what, names in {"recipes": recipes, "tasks": TASKS, "providers": providers, "studies": studies}.items():
        lines = cli("list", what).output.splitlines()
        assert {line.split()[0] for line in lines} == {*names}
        assert all(len(line.split()) > 3 for line in lines)


def test_every_command_ends_with_an_example(cli):
    recipes = [line.split()[0] for line in cli("list", "recipes").output.splitlines()]
    for args in ([], *([name] for name in main.commands), *(["recipe", name] for name in recipes)):
        assert "Example" in cli(*args, "--help").output, args


def test_without_a_name_all_lists_are_shown(cli):
    lists = {what: ran(cli("list", what)).output for what in ("recipes", "studies", "tasks", "providers")}
    whole = ran(cli("list")).output
    assert whole == "\n".join(f"{what.capitalize()}:\n{rows}" for what, rows in lists.items())


def test_a_copied_recipe_runs(cli, tmp_path):
    assert "with `attnreg recipe 'my own.py'`" in ran(cli("copy", "finetune", "my own.py")).output
    ran(cli("copy", "finetune", "mine.py"))
    text = (tmp_path / "mine.py").read_text().replace('@recipe("finetune")', '@recipe("mine")')
    (tmp_path / "mine.py").write_text(text)
    assert_sentence(cli("copy", "ad-drop", "mine.py"), 2, "mine.py is there already: choose another FILE")
    ran(cli("recipe", "mine.py", *QUICK))
    run = tmp_path / "runs/mine-agreement-seed0"
    assert json.loads((run / "config.json").read_text())["recipe"] == "mine"
    assert re.search(r"^attnreg recipe \S*mine\.py ", (run / "report.md").read_text(), re.M)


def test_an_output_folder_that_holds_something_is_left_alone(cli, tmp_path):
    def refused(says, *args, recipe="finetune"):
        assert_sentence(cli("recipe", recipe, *QUICK, "--output-dir", "out", *args), 1, says)

    def contents():
        return {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    ran(cli("recipe", "finetune", *QUICK, "--output-dir", "out"))
    (tmp_path / "file").write_text("x")
    before, config = contents(), tmp_path / "out" / "config.json"
    refused("Expected --output-dir to be new or empty, got out: .* pass --resume")
    refused("Expected --output-dir to be new or empty", "--output-dir", "file")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text("{}\n")
    refused(r"got begun: choose another folder\.$", "--output-dir", "begun")
    refused(r"repeat it with --seed 0 \(not --seed 1\)", "--resume", "--seed", 1)
    refused(r"repeat it with no --validation-rows \(not --validation-rows 9\)", "--resume", "--validation-rows", 9)
    refused("--recipe finetune", "--resume", recipe="attention-layerdrop")
    config.write_text(json.dumps({**json.loads(before[config]), "optimizer": "sgd"}))
    refused("was started with other options: repeat it with an attnreg that has --optimizer, or choose", "--resume")
    config.write_bytes(before[config])
    left_out = cli("recipe", "finetune", "--epochs", 1, "--output-dir", "out", "--resume")
    assert_sentence(left_out, 1, r"repeat it with --train-size 64 \(not given\)")
    (tmp_path / "out" / "result.json").unlink()
    del before[tmp_path / "out" / "result.json"]
    refused("No checkpoint in out/checkpoints, although the run has evaluations", "--resume")
    assert contents() == before


def test_a_recipe_file_that_cannot_be_imported(cli, tmp_path):
    (tmp_path / "mine.py").write_text("import nothing_of_that_name")
    assert_sentence(cli("recipe", "mine.py"), 1, "Cannot import the recipe in mine.py: ModuleNotFoundError")
    (tmp_path / "mine.py").write_text("x = 1")
    says = "mine.py must define exactly one function under `@attnreg.experiments.recipe"
    assert_sentence(cli("recipe", "mine.py"), 1, says)


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
    assert "(cola) for task 'cola' from the hub or the local cache: use --data-dir" in output
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
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # so that it is restored
    monkeypatch.delenv("TTY_COMPATIBLE")
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    ran(cli("list", "tasks"))
    with Path("/dev/ptmx").open() as terminal:
        assert terminal.isatty()
        assert not Console(file=terminal).is_terminal


@given(st.lists(st.sampled_from([*"a1 _*`[]()<>!|\\&~#", "![x](y.png)", "<http://a.b>", "&amp;", "<b>"])).map("".join))
@example("\\_\\_")
def test_a_cell_of_a_report_shows_its_text_as_it_is(text):
    text = " ".join(text.split())
    page = html_page(markdown([Heading("A"), Table(["m", "x"], [[text, "<0.1"]])], Path()), Path())
    assert [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", page)] == [text, "<0.1"]


def test_a_line_break_in_a_cell_does_not_end_its_row():
    assert markdown([Table(["a\nb", "x"], [["c\r\nd", "1"]])], Path()).splitlines()[::2] == [
        "| a b | x |",
        "| c d | 1 |",
    ]


def test_a_written_table_has_few_signs_more_than_the_cells():
    blocks = [Heading("A"), Table(["m", "x"], [["a|b_c", "[<0.1, 1]"]])]
    assert markdown(blocks, Path()) == "# A\n\n| m | x |\n| --- | ---: |\n| a\\|b_c | [<0.1, 1] |\n"


def test_letters_that_the_stream_lacks_are_escaped(tmp_path):
    command = [sys.executable, "-m", "attnreg", "copy", "finetune", "日本.py"]
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Copied finetune to \\u65e5\\u672c.py.")


def test_brackets_in_a_cell_are_printed():
    print_table(Console(file=(screen := io.StringIO()), width=80), Table(["a [b]"], [["x [red] y"], ["data[/x]"]]))
    assert all(text in screen.getvalue() for text in ("a [b]", "x [red] y", "data[/x]"))
