"""Commands in this process: how they end, and the files that they write."""

import csv
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner


def invoke(*args):
    """Run a command; gives click's result, with the exception where there was a traceback."""
    from attnreg.experiments.cli.main import main

    return CliRunner().invoke(main, [str(arg) for arg in args])


def ran(result):
    """The result of a command that has ended well."""
    assert result.exit_code == 0, result.output
    return result


def assert_sentence(result, code, says):
    """A command has failed with one sentence and no traceback."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    error = result.output[result.output.index("Error: ") :].strip()
    assert "\n" not in error
    assert re.search(says, error), error


def read_lines(path):
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def result_of(run):
    """What a run folder has as its result."""
    return json.loads((run / "result.json").read_text())


def read_csv(path):
    """The rows of a table, by column."""
    return [*csv.DictReader(Path(path).read_text().splitlines())]


def write_csv(path, lines):
    """Write the lines of a table, of which the first has the names of columns; return its path."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def assert_close(a, b, within=1e-5):
    if isinstance(a, float):
        assert a == pytest.approx(b, abs=within)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_close(x, y, within)
    elif isinstance(a, dict):
        assert_close(sorted(a.items()), sorted(b.items()), within)
    else:
        assert a == b
