"""Every provider from the command line: it trains, and the loss falls."""

import pytest

from tests.commands import ran, read_lines
from tests.provider_cases import BUILT_IN, CASES
from tests.recipe_cases import RECIPES, WITH_PROVIDER

FIRST = {case.outermost: case for case in reversed(CASES)}
OPTIONS = ["--epochs", 4, "--train-size", 8, "--batch-size", 2, "--learning-rate", 5e-3]
OPTIONS += ["--validation-rows", 32, "--evaluate-every", 16]


def test_none_is_missing():
    assert {*FIRST} == {*BUILT_IN}


def losses(cli, tmp_path, *args):
    result = ran(cli("recipe", *args, *OPTIONS, "--output-dir", "out"))
    lines = read_lines(tmp_path / "out" / "telemetry.jsonl")
    return result.output, [line["loss"] for line in lines]


SOME = [*FIRST][::3]  # in the others, the contract of providers sees that they train


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SOME else pytest.mark.slow) for name in FIRST])
def test_it_trains_from_the_command_line(cli, tmp_path, name):
    output, seen = losses(cli, tmp_path, "regularize", "--provider", FIRST[name].trains or FIRST[name].text)
    assert sum(seen[-2:]) < 0.95 * sum(seen[:2])
    assert "The regularizer was active in" in output


FITTED = "linear-probe"  # before the first step, and then no more


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name in ("finetune", "hiddenkey", "soup") else [pytest.mark.slow])
        for name in RECIPES
        if name != FITTED and (name not in WITH_PROVIDER or name == "hiddenkey")
    ],
)
def test_what_is_no_provider_trains_too(cli, tmp_path, recipe):
    _, seen = losses(cli, tmp_path, recipe, *RECIPES[recipe])
    assert sum(seen[-2:]) < 0.95 * sum(seen[:2])
