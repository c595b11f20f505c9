"""How much time is left, on a terminal and where output is piped, before the first run and while runs go on."""

import re

from attnreg.experiments.compare import make as launch
from attnreg.experiments.runs import loop
from tests.helpers.commands import ran
from tests.helpers.comparisons import started_by

SMALL = ["--train-size", 64, "--batch-size", 8, "--device", "cpu"]


def test_the_time_left_follows_the_runs_that_have_ended(cli, warm, monkeypatch):
    monkeypatch.setattr(launch, "subprocess", started_by(warm))
    output = ran(cli("compare", "finetune", "--seeds", 2, "--jobs", 1, "--epochs", 1, *SMALL)).output
    assert re.search(r"^finetune, seed 0: .*; 1 of 2 runs done, about \d+ s left$", output, re.M)
    assert re.search(r"^finetune, seed 1: .*; 2 of 2 runs done$", output, re.M)


def test_a_long_epoch_is_not_silent(cli, monkeypatch):
    monkeypatch.setattr(loop, "QUIET", 0.0)
    output = ran(cli("recipe", "finetune", "--epochs", 1, *SMALL)).output
    assert re.search(r"^finetune epoch 1/1  step 3 of 8  .*about \d+ s left$", output, re.M)
