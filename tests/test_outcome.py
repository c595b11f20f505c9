"""What a run writes down: for comparisons, for trackers, and in its report, whose command repeats the run."""

import json
import shlex
import subprocess
import sys

import pytest
import torch
import transformers as hf

import attnreg
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.runs.telemetry import Telemetry
from attnreg.experiments.tasks import get_task, load_data, load_model
from attnreg.experiments.tasks.metrics import calibration_error
from attnreg.training import FineTuning, StepResult
from tests.helpers.commands import ran, read_lines
from tests.helpers.learning import TEXT, bert
from tests.helpers.method_cases import sgd
from tests.sweep.checks import Answer

SMALL = ["--train-size", 64, "--batch-size", 32, "--device", "cpu", "--output-dir", "out"]


def test_result_and_predictions(cli, tmp_path, monkeypatch):
    asked = []  # of a checkout on PYTHONPATH, not installed, there is no metadata: at its end, a run asks for none
    monkeypatch.setattr("attnreg.experiments.results.outcome.version", lambda name: asked.append(name) or "1.0")
    result = ran(cli("recipe", "ad-drop", *SMALL, "--epochs", 2))
    assert asked == ["torch", "transformers"]
    got = json.loads((tmp_path / "out" / "result.json").read_text())
    last = read_lines("out/metrics.jsonl")[-1]
    error = got["dev"].pop("calibration_error")
    assert got["dev"] == pytest.approx({name: last[name] for name in got["dev"]})
    assert (got["rows"], got["steps"], got["active_steps"]) == (64, 4, 2)
    assert 0 < got["training_seconds"] < got["seconds"]
    assert 0 < got["training_cpu_seconds"] < 1.5 * got["training_seconds"]  # on one thread, with its helpers
    assert got["peak_memory_bytes"] > 10**8
    predictions = read_lines("out/predictions.jsonl")
    labels = torch.tensor(load_data(get_task("agreement"))[1]["validation"]["label"][:])
    assert [line["label"] for line in predictions] == labels.tolist()
    logits = torch.tensor([line["logits"] for line in predictions])
    assert error == pytest.approx(calibration_error(logits.softmax(-1), labels))
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert float(loss) == pytest.approx(got["dev"]["loss"], rel=1e-5)
    assert "The regularizer was active in 2 of 4 steps and dropped " in result.output


def test_the_training_score_is_of_the_rows_that_were_trained_on(cli, tmp_path):
    cli("recipe", "finetune", *SMALL, "--epochs", 1)
    got = json.loads((tmp_path / "out" / "result.json").read_text())
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").eval()
    _, tokenizer = load_model(get_task("agreement"))
    rows = load_data(get_task("agreement"))[1]["train"].shuffle(seed=0).select(range(64))
    batch = tokenizer(rows["sentence"][:], return_tensors="pt", padding=True)
    with torch.no_grad():
        loss = model(**batch, labels=torch.tensor(rows["label"][:])).loss
    assert got["train"]["loss"] == pytest.approx(float(loss), rel=1e-4)


def test_a_regularizer_that_does_nothing_is_told(cli):
    late = ["--provider", "CrossTuning(DropHead(0.5))"]  # the first epoch is a plain one
    result = cli("recipe", "regularize", *late, *SMALL, "--epochs", 1)
    assert "The regularizer was never active: nothing was dropped in any step." in result.output
    assert "regularizer" not in cli("recipe", "finetune", *SMALL[:-1], "other", "--epochs", 1).output


def test_evaluations_in_between_can_be_spared(cli):
    cli("recipe", "finetune", *SMALL, "--epochs", 5, "--evaluate-every", 2)
    assert [record["epoch"] for record in read_lines("out/metrics.jsonl")] == [2, 4, 5]


@pytest.mark.slow
def test_mixed_precision(cli, tmp_path):
    args = ["recipe", "attention-layerdrop", *SMALL, "--epochs", 1, "--mixed-precision", "bf16"]
    # In a process of its own: accelerate allows one precision in each. It starts from nothing, as nearly no other here.
    subprocess.run([sys.executable, "-m", "attnreg", *map(str, args)], cwd=tmp_path, check=True)
    ran(cli("recipe", "attention-layerdrop", *SMALL[:-1], "plain", "--epochs", 1))
    half, full = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("out", "plain"))
    losses = [half["dev"]["loss"], full["dev"]["loss"]]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_telemetry_and_the_scores(cli, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    game = ["--round-steps", 2, "--no-baseline"]
    ran(cli("recipe", "attendout", *SMALL, "--epochs", 3, *game, "--report-to", "tensorboard"))
    events = EventAccumulator(str(tmp_path / "out" / "attnreg"))
    events.Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    telemetry = read_lines("out/telemetry.jsonl")
    rates = [(line["step"], line["drop_rate"]["encoder.1"]) for line in telemetry if line["drop_rate"]]
    assert scalars["drop_rate/encoder.1"] == [(step, pytest.approx(rate)) for step, rate in rates]
    scores = [(r["step"], r["loss"]) for r in read_lines("out/metrics.jsonl") if r["network"] == "attacker"]
    assert scalars["dev/attacker/loss"] == [(step, pytest.approx(loss)) for step, loss in scores]
    assert "reward" in scalars


def step(loss=1.0, **events):
    return StepResult(torch.tensor(loss), {}, events)


def test_telemetry_weighs_lines_by_their_steps():
    written = []
    telemetry = Telemetry(written.append)
    for number in range(1, 13):  # a line of ten steps and one of two
        telemetry.note(number, step(), {"encoder.0": torch.tensor(0.5 if number <= 10 else 0.2)})
    telemetry.flush(12)
    assert [line["step"] for line in written] == [10, 12]
    for means in (telemetry.end_epoch(), telemetry.mean_drop_rates()):
        assert means == {"encoder.0": pytest.approx((10 * 0.5 + 2 * 0.2) / 12)}
    telemetry.note(13, step(), {})
    assert telemetry.end_epoch() == {}
    assert telemetry.active_steps() == 12


def test_an_event_ends_a_line():
    written = []
    telemetry = Telemetry(written.append)
    for number, result in enumerate((step(2.0), step(4.0, winner="attacker"), step(1.0)), 1):
        telemetry.note(number, result, {})
    telemetry.flush(3)
    assert written == [
        {"step": 2, "loss": 3.0, "drop_rate": {}, "winner": "attacker"},
        {"step": 3, "loss": 1.0, "drop_rate": {}},
    ]


def test_the_rate_of_masks_that_differ_by_head_is_their_mean():
    def first_key_of_head_one(site):
        keep = torch.ones(site.shape, dtype=torch.bool)
        keep[:, 1, :, 0] = False
        return attnreg.Mask(scores=keep)

    written = []
    model = bert()
    method, telemetry = FineTuning(model, sgd(model), Answer(first_key_of_head_one)), Telemetry(written.append)
    telemetry.note(1, method.step(TEXT), method.drop_rates())
    assert all(rate.dim() == 0 for rate in method.drop_rates().values())
    telemetry.flush(1)
    assert written[0]["drop_rate"]["encoder.0"] == pytest.approx(1 / 8)
    assert method.handle.drop_rates()["encoder.1"] == pytest.approx(1 / 8)


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    from attnreg.experiments.results import outcome

    commit_of = outcome._commit.__wrapped__  # asked each time
    (tmp_path / "attnreg").mkdir()
    (tmp_path / "attnreg" / "__init__.py").write_text("")
    monkeypatch.setattr(outcome.attnreg, "__file__", str(tmp_path / "attnreg" / "__init__.py"))
    assert commit_of() == {}
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]
    for words in (["init", "-q"], ["add", "."], commit, ["rev-parse", "HEAD"]):
        head = subprocess.check_output(["git", *words], cwd=tmp_path, text=True)
    assert head.startswith(commit_of()["commit"])
    (tmp_path / "attnreg" / "__init__.py").write_text("a = 1")
    assert commit_of()["commit"].endswith("-dirty")
    monkeypatch.setenv("PATH", str(tmp_path))  # no git here
    assert commit_of() == {}


TINY = ["--train-size", 32, "--batch-size", 8, "--epochs", 1, "--device", "cpu"]


def command_in(run):
    lines = (run / "report.md").read_text().splitlines()
    return shlex.split(next(line for line in lines if line.startswith("attnreg recipe ")))


def test_the_command_in_a_report_repeats_the_run(cli, tmp_path):
    provider = "AttentionDropout(0.25, placement='scores') & DropHead(0.1)"
    options = ["--seed", 3, "--select", "best", "--stopping-rows", 8, "--output-dir", "out"]
    ran(cli("recipe", "regularize", "--provider", provider, *TINY, *options))
    ran(cli(*command_in(tmp_path / "out")[1:], "--device", "cpu", "--output-dir", "again"))
    assert read_lines(tmp_path / "again" / "metrics.jsonl") == read_lines(tmp_path / "out" / "metrics.jsonl")


COMMANDS = [
    ["attendout", "--no-baseline", "--credit", "Reinforce(reward='gap')", "--epochs", "4"],
    ["ad-drop", "--regime", "paper", "--layers", "0,-1", "--q", "0.2"],
    ["finetune", "--class-weights", "balanced", "--lr-warmup", "0", "--model-dropout", "0"],
    ["pretrain"],
    ["regularize", "--provider", "DropHead(0.1) & AttentionDropout(0.1, 'scores')", "--provider-lr", "0.5"],
    ["finetune", "--task", "custom", "--data-dir", "my data", "--text-columns", "a", "--text-columns", "b", "--label-column", "x"],
]  # fmt: skip


@pytest.mark.parametrize("args", COMMANDS, ids=lambda args: args[0])
def test_the_command_has_the_options_of_the_run(args):
    settings = load_command(args[0]).settings(args[1:])
    words = shlex.split(settings.command())
    assert words[:3] == ["attnreg", "recipe", args[0]]
    assert load_command(words[2]).settings(words[3:]).to_dict() == settings.to_dict()
