"""Every provider from the command line: it trains, and the loss falls."""

import pytest

from tests.commands import ran, read_lines
from tests.provider_cases import BUILT_IN, CASES

FIRST = {case.outermost: case for case in reversed(CASES)}
OPTIONS = ["--epochs", 4, "--train-size", 8, "--batch-size", 2, "--learning-rate", 5e-3]
OPTIONS += ["--validation-rows", 32, "--evaluate-every", 4]


def test_none_is_missing():
    assert {*FIRST} == {*BUILT_IN}


def losses(cli, tmp_path, *args):
    result = ran(cli("recipe", *args, *OPTIONS, "--output-dir", "out"))
    lines = read_lines(tmp_path / "out" / "telemetry.jsonl")
    return result.output, [line["loss"] for line in lines]


@pytest.mark.parametrize("name", FIRST)
def test_it_trains_from_the_command_line(cli, tmp_path, name):
    output, seen = losses(cli, tmp_path, "regularize", "--provider", FIRST[name].trains or FIRST[name].text)
    assert sum(seen[-2:]) < 0.95 * sum(seen[:2])
    assert "The regularizer was active in" in output


METHODS = [
    ["r-drop", "--alpha", 0.5],
    ["mixout", "--p", 0.1],
    ["sam"],
    ["child-tuning"],
    ["r3f", "--eps", 0.1],
    ["hiddenkey", "--p", 0.1],
]


@pytest.mark.parametrize("recipe", METHODS, ids=lambda args: args[0])
def test_what_is_no_provider_trains_too(cli, tmp_path, recipe):
    _, seen = losses(cli, tmp_path, *recipe)
    assert sum(seen[-2:]) < 0.95 * sum(seen[:2])
