"""Whole runs through the command line: the folder, the report, determinism, stopping and going on."""

import dataclasses
import json
import re
import shutil
import time

import pytest
import transformers as hf

import attnreg
from attnreg.experiments.runs.stopping import read_state
from attnreg.experiments.tasks import built_in, get_task, load_data
from tests.helpers.cases import tiny_bert
from tests.helpers.commands import assert_sentence, invoke, ran, read_lines
from tests.helpers.method_cases import same
from tests.helpers.recipe_cases import RECIPES, WITH_PROVIDER, recipes

SMALL = ["--epochs", 2, "--train-size", 128, "--batch-size", 16, "--device", "cpu", "--keep-checkpoints"]
QUICK = ("finetune", "attendout", "ad-drop", "scheduled-bernoulli")  # not only in slow tests
MEASURED = {"training_cpu_seconds", "seconds", "training_seconds", "peak_memory"}  # differ from run to run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, request):
    """One finished run of each recipe that a test asks for."""
    folder = tmp_path_factory.mktemp("runs")
    outputs = {}
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("recipe") for item in here}
    for name in {*asked, *QUICK} & {*RECIPES}:
        args = ["recipe", name, *SMALL, *RECIPES[name], "--output-dir", folder / name]
        result = ran(invoke(*args))
        outputs[name] = result.output
    return folder, outputs


@recipes(*QUICK)
def test_run_folder(finished, recipe):
    folder, outputs = finished
    run = folder / recipe
    config = json.loads((run / "config.json").read_text())
    assert config["recipe"] == recipe
    assert config["attnreg"] == attnreg.__version__
    assert (config["task"], config["epochs"], config["train_size"], config["seed"]) == ("agreement", 2, 128, 0)
    metrics = read_lines(run / "metrics.jsonl")
    networks = ["defender", "attacker", "attacker"] if recipe == "attendout" else ["model", "model"]
    assert [record["network"] for record in metrics] == networks  # the game is over after the first epoch
    assert {"epoch", "step", "loss", "matthews_correlation", "accuracy"} <= metrics[0].keys()
    telemetry = read_lines(run / "telemetry.jsonl")
    # Every ten steps, at the end of an epoch, and at the end of each round (of two steps, after a warm-up of one).
    rounds = {3, 5, 7, 8} if recipe == "attendout" else set()  # the game ends with a round of one step
    assert [record["step"] for record in telemetry] == sorted({8, 10, 16} | rounds)
    report = (run / "report.md").read_text()
    for said in ("The game had 4 rounds: the Attacker won", "The attacker's network of the last epoch"):
        assert (said in report) == (recipe == "attendout")
    assert {record["step"] for record in telemetry if "winner" in record} == rounds
    layers = [f"encoder.{i}" for i in range(3)] if recipe in WITH_PROVIDER else []
    if recipe == "hiddenkey":
        layers = [site for layer in layers for site in (layer, f"{layer}.output")]
    assert list(telemetry[-1]["drop_rate"]) == layers
    if recipe == "ad-drop":
        assert [list(record["drop_rate"]) for record in metrics] == [[], layers]
    assert (run / "provider").is_dir() == (recipe in WITH_PROVIDER)
    assert f"{metrics[-1]['matthews_correlation']:.4f}" in report
    assert all(layer in report for layer in layers)
    assert len(list((run / "checkpoints").iterdir())) == 1
    assert str(run) in outputs[recipe]


@recipes(*QUICK)
def test_the_kept_model_is_the_last_epochs_and_loads_plainly(finished, recipe):
    run = finished[0] / recipe
    hf.AutoModelForSequenceClassification.from_pretrained(run / "model")
    ran(invoke("evaluate", run))
    got = json.loads((run / "evaluations" / "agreement.json").read_text())["metrics"]["matthews_correlation"]
    network = "attacker" if recipe == "attendout" else "model"
    last = [r["matthews_correlation"] for r in read_lines(run / "metrics.jsonl") if r["network"] == network][-1]
    assert got == pytest.approx(last, abs=2e-3)  # padding to another length moves the last bits
    if recipe in WITH_PROVIDER:
        attnreg.Regularizer.from_pretrained(run / "provider")


def checkpoint_of(run):
    state = read_state(run / "checkpoints")
    state["history"] = {name: value for name, value in state["history"].items() if name not in MEASURED}
    return [path.name for path in (run / "checkpoints").iterdir()], state


@recipes("ad-drop")
def test_killed_in_the_middle_of_an_epoch_it_goes_on_to_the_same_end(finished, recipe, spawn, tmp_path):
    args = ["recipe", recipe, *SMALL, *RECIPES[recipe], "--output-dir", "out", "--save-steps", 3]
    process = spawn(*args)
    checkpoints = tmp_path / "out" / "checkpoints"
    while process.poll() is None and not any(path.name >= "step-0000009" for path in checkpoints.glob("step-*")):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert sorted(checkpoints.glob("step-*")), "killed before its first checkpoint"
    resumed = spawn(*args, "--resume")
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    for name in ("metrics.jsonl", "telemetry.jsonl"):
        assert read_lines(tmp_path / "out" / name) == read_lines(finished[0] / recipe / name)
    assert same(checkpoint_of(tmp_path / "out"), checkpoint_of(finished[0] / recipe))


def test_stopped_between_an_evaluation_and_its_checkpoint(finished, cli, tmp_path):
    shutil.copytree(finished[0] / "finetune", tmp_path / "out")
    args = ["recipe", "finetune", *SMALL, "--output-dir", "out", "--save-steps", 16]
    for name in ("metrics.jsonl", "telemetry.jsonl"):
        lines = (tmp_path / "out" / name).read_text().splitlines(keepends=True)
        (tmp_path / "out" / name).write_text("".join([*lines, lines[-1]]))  # of the same step as the checkpoint
    assert cli(*args, "--resume").exit_code == 0
    for name in ("metrics.jsonl", "telemetry.jsonl"):
        assert read_lines(tmp_path / "out" / name) == read_lines(finished[0] / "finetune" / name)


@pytest.mark.parametrize("more", [False, True])
def test_stopped_before_its_first_checkpoint_it_starts_over(finished, cli, tmp_path, more):
    whole, out = finished[0] / "finetune", tmp_path / "out"
    out.mkdir()
    shutil.copy(whole / "config.json", out)
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines if more else lines[:1]))
    result = cli("recipe", "finetune", *SMALL, "--output-dir", "out", "--save-steps", 16, "--resume")
    if more:  # somebody has removed the checkpoints
        assert_sentence(result, 1, "No checkpoint in out/checkpoints, although the run has evaluations")
    else:
        ran(result)
        assert read_lines(out / "metrics.jsonl") == read_lines(whole / "metrics.jsonl")


def test_a_finished_run_keeps_no_checkpoint_and_files_have_the_usual_mode(cli, tmp_path):
    args = ["recipe", "attendout", *SMALL[:-1], "--epochs", 1, "--round-steps", 2, "--output-dir", "out"]
    ran(cli(*args))
    assert not list((tmp_path / "out").rglob("checkpoints"))
    (tmp_path / "new").touch()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "new").stat().st_mode}
    report = (tmp_path / "out" / "report.md").read_text()
    assert ran(cli(*args, "--resume")).output.strip() == report.strip()
    assert (tmp_path / "out" / "report.md").read_text() == report
    (tmp_path / "out" / "report.md").unlink()
    assert ran(cli(*args, "--resume")).output.strip() == "The run in out has finished."


def test_attendout_compares_with_plain_fine_tuning_on_the_same_data_and_seed(finished, cli, tmp_path):
    result = ran(cli("recipe", "attendout", *SMALL, "--round-steps", 2, "--output-dir", "out"))
    for name in ("defender", "attacker", "plain", "Drop rate per layer"):
        assert name in result.output
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| plain fine-tuning | " in text
    assert "One seed is no evidence" in text
    assert "attnreg compare finetune attendout --task agreement --seeds 10" in text
    assert re.search(r"epoch 1/2 .* about \d+ s left\n", result.output)  # there is no terminal
    assert not re.search(r"epoch 2/2 .* left\n", result.output)
    plain = read_lines(tmp_path / "out" / "baseline" / "metrics.jsonl")
    assert plain == read_lines(finished[0] / "finetune" / "metrics.jsonl")
    game = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert game == read_lines(finished[0] / "attendout" / "metrics.jsonl")
    shutil.rmtree(tmp_path / "out" / "baseline" / "checkpoints")  # as if stopped before its first checkpoint
    ran(cli("recipe", "attendout", *SMALL, "--round-steps", 2, "--output-dir", "out", "--resume"))
    assert read_lines(tmp_path / "out" / "baseline" / "metrics.jsonl") == plain


def test_drop_rates_are_those_asked_for(finished):
    folder, outputs = finished
    mean = [sum(line["drop_rate"].values()) / 3 for line in read_lines(folder / "scheduled-bernoulli/telemetry.jsonl")]
    assert mean[0] > mean[-1]
    assert mean[0] == pytest.approx(0.3 - 0.2 * 4 / 16, abs=0.02)
    plain, masked = read_lines(folder / "ad-drop" / "metrics.jsonl")  # AD-DROP masks every other epoch
    assert plain["drop_rate"] == {}
    assert list(masked["drop_rate"].values())[:2] == [pytest.approx(0.5 * 0.4, abs=0.05)] * 2  # p n is rounded up
    assert re.search(r"epoch 1/2 .* nothing dropped .*\nepoch 2/2 .* drop rate 0\.1", outputs["ad-drop"])


@pytest.mark.parametrize(("given", "dropping"), [([], [0]), (["--layers", "all"], [0, 1]), (["--layers", "1"], [1])])
def test_layers_of_ad_drop_all_given_or_the_tasks(cli, tmp_path, monkeypatch, given, dropping):
    monkeypatch.setitem(built_in.TASKS, "agreement", dataclasses.replace(get_task("agreement"), ad_drop_layers=(0,)))
    ran(cli("recipe", "ad-drop", "--epochs", 2, "--train-size", 8, "--q", 1, *given, "--output-dir", "out"))
    rates = read_lines(tmp_path / "out" / "metrics.jsonl")[-1]["drop_rate"]
    assert [layer for layer in range(2) if rates[f"encoder.{layer}"] > 0] == dropping


@recipes("ad-drop")
def test_real_cola(real_data, cli, tmp_path, recipe):
    options = ["--task", "cola", "--data-dir", real_data / "cola", "--model", tmp_path / "model", "--epochs", 2]
    tiny_bert(load_data(get_task("cola"), real_data / "cola")[1]["train"]["sentence"][:500], tmp_path / "model")
    ran(cli("recipe", recipe, *options, *RECIPES[recipe], "--train-size", 200, "--output-dir", "out"))
    assert read_lines(tmp_path / "out" / "metrics.jsonl")[-1]["step"] > 0
