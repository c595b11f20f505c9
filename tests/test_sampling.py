"""Which rows are drawn: by share of the class, by number per class, and by fold."""

from collections import Counter

import numpy as np
import pytest

from attnreg.errors import InputError, UsageError
from attnreg.experiments.setup.sampling import stratified
from attnreg.experiments.tasks import get_task, load_splits
from tests.commands import assert_sentence, ran, read_lines
from tests.test_run_data import make, texts


def labels(run):
    return Counter(run.train_rows["labels"][:])


def test_shares_are_kept_up_to_rounding():
    draw = np.random.default_rng(0)
    for _ in range(50):
        given = draw.integers(0, 4, 200).tolist()
        size = int(draw.integers(1, 201))
        chosen = stratified(given, size)
        assert len(chosen) == len(set(chosen)) == size
        assert chosen == sorted(chosen)
        whole, some = Counter(given), Counter(given[row] for row in chosen)
        assert all(abs(some[label] - size * count / 200) < 1 for label, count in whole.items())
        for label in whole:  # the first rows of each class
            rows = [row for row, each in enumerate(given) if each == label]
            assert rows[: some[label]] == [row for row in chosen if given[row] == label]


def test_rows_are_drawn_by_the_seed_and_by_class(tmp_path):
    first, again, other = (make(tmp_path, train_size=None, shots=7, seed=seed) for seed in (0, 0, 1))
    assert labels(first) == {0: 7, 1: 7}
    assert texts(first.train_rows) == texts(again.train_rows) != texts(other.train_rows)
    share = np.mean(load_splits(get_task("agreement"))["train"]["label"])
    assert labels(make(tmp_path, train_size=101, stratified=True))[1] == pytest.approx(101 * share, abs=1)


def test_folds_divide_train_and_each_is_scored_on_once(tmp_path):
    runs = [make(tmp_path, train_size=None, folds=4, seed=seed) for seed in range(4)]
    everything = sorted(texts(make(tmp_path, train_size=None).train_rows))
    assert sorted(row for run in runs for row in texts(run.dev_rows)) == everything
    for run in runs:
        assert sorted(texts(run.train_rows) + texts(run.dev_rows)) == everything
        assert run.scored_on == "held-out"
    same = make(tmp_path, train_size=None, folds=4, seed=4)  # the first part again, in another order
    assert texts(same.dev_rows) == texts(runs[0].dev_rows)
    assert texts(same.train_rows) != texts(runs[0].train_rows)
    nested = make(tmp_path, train_size=None, folds=4, seed=1, validation_rows=50)
    assert len(nested.dev_rows) == 50
    assert not set(map(tuple, texts(nested.dev_rows))) <= set(map(tuple, texts(runs[1].dev_rows)))


def test_what_does_not_fit_is_said(tmp_path):
    for options, kind, says in [
        ({"shots": 5000, "train_size": None}, InputError, "Expected --shots of at most .*, the rows of class . in train"),
        ({"shots": 5}, UsageError, "--shots and --train-size both say how many rows"),
        ({"folds": 5000}, InputError, "Expected --folds of at most 2000"),
        ({"task": "agreement-words", "stratified": True}, UsageError, "--stratified is for classification"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=says):
            make(tmp_path, **options)


def test_on_the_command_line(cli, tmp_path):
    small = ["--shots", 8, "--folds", 20, "--epochs", 1, "--device", "cpu"]
    output = ran(cli("recipe", "finetune", *small, "--seed", 3, "--output-dir", "out")).output
    assert "on held-out rows, seed 3" in output
    assert len(read_lines(tmp_path / "out" / "predictions.jsonl")) == 100
    again = ran(cli("compare", "finetune", "ad-drop", *small, "--stratified", "--dry-run")).output
    assert "10 runs in all" in again
    result = cli("compare", "finetune", "ad-drop --shots 4", "--epochs", 1)
    assert_sentence(result, 2, "--shots must be the same for all methods")
