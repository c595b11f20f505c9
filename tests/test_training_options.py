"""Options of training that all recipes share: what they reach, what they refuse, and what they change."""

import math

import pytest

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.options.settings import SCHEDULES
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.runs.run import Run
from attnreg.training import FineTuning
from tests.commands import assert_sentence, ran

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


def rate_of(name, step, warmup, steps):
    """The learning rate of a step, counted from 0, as a share of its peak: transformers' formulas, written out."""
    if name == "constant":
        return 1.0
    if step < warmup:
        return step / warmup
    done = (step - warmup) / (steps - warmup)
    return {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "inverse_sqrt": math.sqrt(warmup / step),
        "constant_with_warmup": 1.0,
    }[name]


@pytest.mark.parametrize("warmup", [None, 0.5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_follow_the_named_schedule(made, name, warmup):
    given = [] if warmup is None or name == "constant" else ["--lr-warmup", warmup]
    run = made("--schedule", name, *given, "--epochs", 5)
    optimizer = run.optimizer(run.model)
    schedule, rates = run.schedule(optimizer), []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"] / run.settings.learning_rate)
        optimizer.step()
        schedule.step()
    steps = 2 if warmup is None else 10
    assert rates == [pytest.approx(rate_of(name, step, steps, 20), abs=1e-12) for step in range(20)]


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
    assert_sentence(
        cli(*args, "--report-to", "smoke"), 1, "Expected --report-to to be an installed tracker .*, got smoke"
    )


def test_trackers_get_the_options_of_the_recipe(made, monkeypatch):
    seen = {}
    monkeypatch.setattr("attnreg.experiments.setup.setup.tracked", lambda accelerator, options: seen.update(options))
    made("--drop-rate", 0.3, recipe="attention-layerdrop").tracked()
    assert (seen["recipe"], seen["seed"], seen["p"]) == ("attention-layerdrop", 0, 0.3)
