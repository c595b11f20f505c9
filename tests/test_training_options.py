"""Options of training that all recipes share: what they reach, what they refuse, and what they change."""

import pytest

import attnreg
from attnreg.experiments.runs.catalogue import load_command
from attnreg.experiments.runs.run import Run

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
