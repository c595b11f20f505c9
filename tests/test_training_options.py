"""Options of training that all recipes share, and the device: what they reach, what they refuse, what they change."""

import json

import pytest
import torch
import transformers
from torch import nn

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.compare import make as launch
from attnreg.experiments.options.settings import SCHEDULES
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.runs.run import Run
from attnreg.experiments.setup.device import choose_device, set_threads
from attnreg.training import FineTuning
from tests.helpers.commands import assert_sentence, ran

TINY = ["--train-size", 32, "--batch-size", 8, "--epochs", 1, "--device", "cpu"]


@pytest.fixture
def made(tmp_path):
    """Makes a run that has not trained yet."""

    def make(*options, recipe="finetune"):
        args = [str(word) for word in (*TINY, *options, "--output-dir", tmp_path / "out")]
        return Run(load_command(recipe).settings(args))

    return make


def test_weight_decay_is_that_of_the_matrices_only(made):
    for options, expected in (([], 0.01), (["--weight-decay", 0.3], 0.3), (["--weight-decay", 0], 0.0)):
        run = made(*options)
        groups = run.optimizer(run.model, attnreg.ConcreteDropout(num_layers=3)).param_groups
        decays = {p.dim() > 1: group["weight_decay"] for group in groups[:2] for p in group["params"]}
        assert decays == {True: expected, False: 0.0}
        assert [group["weight_decay"] for group in groups[2:]] == [0.0]  # of the provider


@pytest.mark.parametrize(("typed", "norm"), [("none", None), ("0", None), ("0.5", 0.5), (None, 1.0)])
def test_gradients_are_clipped_as_asked(made, typed, norm):
    run = made(*([] if typed is None else ["--max-grad-norm", typed]))
    methods = []
    run.fit = methods.append
    run.train()
    assert methods[0].max_grad_norm == methods[0].updater.max_grad_norm == norm
    assert ("--max-grad-norm" in run.settings.command()) == (typed is not None)
    if typed:
        del run.fit
        with pytest.raises(InputError, match=f"made with max_grad_norm={norm} .*it would ignore --max-grad-norm"):
            run.fit(FineTuning(run.model, run.optimizer(run.model), accelerator=run.accelerator))


@pytest.mark.parametrize("warmup", [None, 0.5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_follow_the_named_schedule(made, name, warmup):
    given = [] if warmup is None or name == "constant" else ["--lr-warmup", warmup]
    run = made("--schedule", name, *given, "--epochs", 5)
    optimizers = run.optimizer(run.model), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=run.settings.learning_rate)
    theirs = transformers.get_scheduler(name, optimizers[1], 2 if warmup is None else 10, 20)
    schedule = run.schedule(optimizers[0])
    for _ in range(20):
        assert len({optimizer.param_groups[0]["lr"] for optimizer in optimizers}) == 1
        for step in (optimizers[0], optimizers[1], schedule, theirs):
            step.step()


def test_a_warm_up_without_one_in_the_schedule_is_refused(cli):
    result = cli("recipe", "finetune", "--schedule", "constant", "--lr-warmup", 0.2)
    assert_sentence(result, 2, "constant has no warm-up, got --lr-warmup 0.2: use --schedule constant_with_warmup")
    settings = load_command("ad-drop").settings(["--regime", "paper", "--lr-warmup", "0"])
    assert (settings.schedule, settings.lr_warmup) == ("constant", 0)


def test_each_run_of_a_comparison_logs_to_the_trackers(cli):
    args = ["compare", "finetune", "mixout", *TINY, "--seeds", 1, "--launcher", "commands", "--output-dir", "out"]
    lines = ran(cli(*args, "--report-to", "tensorboard")).stdout.splitlines()
    assert len(lines) == 2
    assert all("--report-to tensorboard" in line for line in lines)
    assert "--report-to" not in ran(cli(*args)).stdout
    refused = cli(*args, "--report-to", "smoke")
    assert_sentence(refused, 1, "Expected --report-to to be an installed tracker .*, got smoke")


def test_trackers_get_the_options_of_the_recipe(made, monkeypatch):
    seen = {}
    monkeypatch.setattr("attnreg.experiments.setup.setup.tracked", lambda accelerator, options: seen.update(options))
    made("--drop-rate", 0.3, recipe="attention-layerdrop").tracked()
    assert (seen["recipe"], seen["seed"], seen["p"]) == ("attention-layerdrop", 0, 0.3)


@pytest.fixture
def built_for_cuda(monkeypatch):
    """Torch's usual build for Linux, on a machine without a GPU or its driver."""

    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_build_for_cuda_without_a_gpu_runs_on_the_cpu(cli, built_for_cuda):
    assert choose_device() == choose_device("cpu") == torch.device("cpu")
    ran(cli("recipe", "finetune", "--epochs", 1, "--train-size", 32, "--output-dir", "out"))
    ran(cli("evaluate", "out"))
    assert_sentence(cli("evaluate", "out", "--device", "cuda"), 1, "No cuda device found. Use --device cpu")
    for name in ("foo", "cuda:1"):
        assert_sentence(cli("evaluate", "out", "--device", name), 2, f"'{name}' is not one of 'cpu', 'cuda', 'mps'")


def test_an_accelerator_is_used_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert choose_device() == choose_device("mps") == torch.device("mps")
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("cuda", "foo", "", "cuda:1"):
        with pytest.raises(InputError, match=rf"^No {name} device found\. Use --device cpu, or leave --device out\.$"):
            choose_device(name)
    assert launch.usual_jobs(threads=1, on_cpu=False) == 1
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 3)
    assert launch.usual_jobs(threads=1, on_cpu=True) == 3


def test_a_small_model_trains_with_one_thread_unless_told_otherwise(cli, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    few = ("recipe", "finetune", "--epochs", 1, "--train-size", 8, "--device", "cpu")
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        for threads, options, variable in ((1, (), None), (3, ("--threads", 3), None), (2, (), "2")):
            torch.set_num_threads(2)
            if variable is not None:
                monkeypatch.setenv("OMP_NUM_THREADS", variable)
            ran(cli(*few, *options, "--output-dir", f"out{threads}"))
            run = tmp_path / f"out{threads}"
            assert json.loads((run / "result.json").read_text())["environment"]["threads"] == threads
            assert f"CPU threads: {threads} (--threads)." in (run / "report.md").read_text()
        monkeypatch.delenv("OMP_NUM_THREADS")
        torch.set_num_threads(2)
        assert set_threads(None, 5_000_001) == 2
    finally:
        torch.set_num_threads(before)
