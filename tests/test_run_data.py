"""Which rows a run trains on, is scored on and holds out: all, by share of the class, by number per class, by fold."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnreg.errors import InputError, UsageError
from attnreg.experiments.setup.rows import stratified
from attnreg.experiments.tasks import get_task, load_data
from attnreg.training import FineTuning
from tests.helpers.commands import assert_sentence, ran, read_lines
from tests.helpers.runs import make, texts, trained_on


def test_a_method_without_the_runs_accelerator_is_refused_where_it_matters(tmp_path):
    run = make(tmp_path, epochs=1)
    method = FineTuning(run.model, run.optimizer(run.model))
    assert run.fit(method).step == 7
    plain = {"num_processes": 1, "mixed_precision": "no", "device": torch.device("cpu")}
    for other in ({"num_processes": 2}, {"mixed_precision": "bf16"}, {"device": torch.device("cuda")}):
        run.accelerator = SimpleNamespace(**{**plain, **other})
        with pytest.raises(InputError, match=r"Expected FineTuning to be made with accelerator=run.accelerator"):
            run.fit(method)


@pytest.mark.parametrize(("epochs", "rows"), [(3, [160, 160, 160, 200]), (None, [160] * 4)])
def test_rows_held_out_for_some_epochs_come_back(tmp_path, epochs, rows):
    run = make(tmp_path)
    held = run.rows_in_order(run.hold_out_rows(40, epochs=epochs))
    assert sum(len(batch["labels"]) for batch in held) == 40
    assert [trained_on(run, epoch) for epoch in range(4)] == rows
    assert run.total_steps == sum(-(-each // 32) for each in rows)
    assert run.steps_in(3) == 15
    assert len(run.train_rows) == rows[-1]


def test_validation_rows_are_rows_of_train_that_are_not_trained_on(tmp_path, few_rows):
    plain, run = make(tmp_path, train_size=None), make(tmp_path, train_size=None, validation_rows=300)
    everything = texts(plain.train_rows)
    assert texts(run.train_rows) == everything[:-300]
    assert texts(run.dev_rows) == everything[-300:]
    assert run.scored_on == "held-out"
    small = make(tmp_path, validation_rows=300)
    assert texts(small.train_rows) == everything[:200]  # the rows that a run of this size has anyway
    assert texts(small.dev_rows) == everything[-300:]


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


def test_rows_are_drawn_by_the_seed_and_by_class(tmp_path, few_rows):
    first, again, other = (make(tmp_path, train_size=None, shots=7, seed=seed) for seed in (0, 0, 1))
    assert labels(first) == {0: 7, 1: 7}
    assert texts(first.train_rows) == texts(again.train_rows) != texts(other.train_rows)
    share = np.mean(load_data(get_task("agreement"))[1]["train"]["label"])
    assert labels(make(tmp_path, train_size=101, stratified=True))[1] == pytest.approx(101 * share, abs=1)


def test_folds_divide_train_and_each_is_scored_on_once(tmp_path, few_rows):
    runs = [make(tmp_path, train_size=None, folds=2, seed=seed) for seed in range(2)]
    everything = sorted(texts(make(tmp_path, train_size=None).train_rows))
    assert sorted(row for run in runs for row in texts(run.dev_rows)) == everything
    for run in runs:
        assert sorted(texts(run.train_rows) + texts(run.dev_rows)) == everything
        assert run.scored_on == "held-out"
    same = make(tmp_path, train_size=None, folds=2, seed=2)  # the first part again, in another order
    assert texts(same.dev_rows) == texts(runs[0].dev_rows)
    assert texts(same.train_rows) != texts(runs[0].train_rows)
    nested = make(tmp_path, train_size=None, folds=2, seed=1, validation_rows=50)
    assert len(nested.dev_rows) == 50
    assert not set(map(tuple, texts(nested.dev_rows))) <= set(map(tuple, texts(runs[1].dev_rows)))


def test_what_does_not_fit_is_said(tmp_path):
    for options, kind, says in [
        ({"shots": 5000, "train_size": None}, InputError, "Expected --shots of at most .*, rows of class . in train"),
        ({"shots": 5}, UsageError, "--shots and --train-size both say how many rows"),
        ({"folds": 5000}, InputError, "Expected --folds of at most 2000"),
        ({"task": "agreement-words", "stratified": True}, UsageError, "--stratified is for classification"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=says):
            make(tmp_path, **options)


def test_a_folder_that_another_run_has_used_since_is_refused(tmp_path):
    first, second = (make(tmp_path, epochs=1, seed=seed) for seed in (0, 1))
    first.fit(FineTuning(first.model, first.optimizer(first.model), accelerator=first.accelerator))
    with pytest.raises(InputError, match="Expected --output-dir to be new or empty"):
        second.fit(FineTuning(second.model, second.optimizer(second.model), accelerator=second.accelerator))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 0


def test_on_the_command_line(cli, tmp_path):
    small = ["--shots", 8, "--folds", 20, "--epochs", 1, "--device", "cpu"]
    output = ran(cli("recipe", "finetune", *small, "--seed", 3, "--output-dir", "out")).output
    assert "on held-out rows, seed 3" in output
    assert len(read_lines(tmp_path / "out" / "predictions.jsonl")) == 100
    again = ran(cli("compare", "finetune", "sam", *small, "--dry-run")).output
    assert "10 runs in all" in again
    result = cli("compare", "finetune", "ad-drop --shots 4", "--epochs", 1)
    assert_sentence(result, 2, "--shots must be the same for all methods")
