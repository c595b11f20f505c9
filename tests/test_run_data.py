"""Which rows a run trains on, is scored on and holds out."""

from types import SimpleNamespace

import pytest
import torch

from attnreg.errors import InputError
from attnreg.experiments import Run
from attnreg.experiments.options.settings import Settings
from attnreg.training import FineTuning


def make(tmp_path, **options):
    defaults = {
        "recipe": "finetune",
        "task": "agreement",
        "epochs": 4,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "max_length": 32,
        "train_size": 200,
        "device": "cpu",
        "output_dir": tmp_path / "run",
    }
    return Run(Settings(**{**defaults, **options}))


def test_a_method_without_the_runs_accelerator_is_refused_where_it_matters(tmp_path):
    run = make(tmp_path, epochs=1)
    method = FineTuning(run.model, run.optimizer(run.model))
    assert run.fit(method).step == 7
    plain = {"num_processes": 1, "mixed_precision": "no", "device": torch.device("cpu")}
    for other in ({"num_processes": 2}, {"mixed_precision": "bf16"}, {"device": torch.device("cuda")}):
        run.accelerator = SimpleNamespace(**{**plain, **other})
        with pytest.raises(InputError, match=r"Expected FineTuning to be made with accelerator=run.accelerator"):
            run.fit(method)


def texts(rows):
    return [tuple(ids) for ids in rows["input_ids"]]


def trained_on(run, epoch):
    return sum(len(batch["labels"]) for batch in run.train_batches(epoch).epoch(epoch))


def test_rows_held_out_for_some_epochs_come_back(tmp_path):
    run = make(tmp_path)
    held = run.rows_in_order(run.hold_out_rows(40, epochs=3))
    assert sum(len(batch["labels"]) for batch in held) == 40
    assert [trained_on(run, epoch) for epoch in range(4)] == [160, 160, 160, 200]
    assert run.total_steps == 3 * 5 + 7
    assert run.steps_in(3) == 15
    assert len(run.train_rows) == 200


def test_rows_held_out_for_good(tmp_path):
    run = make(tmp_path)
    run.hold_out_rows(40)
    assert [trained_on(run, epoch) for epoch in range(4)] == [160] * 4
    assert len(run.train_rows) == 160


def test_validation_rows_are_rows_of_train_that_are_not_trained_on(tmp_path):
    plain, run = make(tmp_path, train_size=None), make(tmp_path, train_size=None, validation_rows=300)
    everything = texts(plain.train_rows)
    assert texts(run.train_rows) == everything[:-300]
    assert texts(run.dev_rows) == everything[-300:]
    assert run.scored_on == "held-out"
    small = make(tmp_path, validation_rows=300)
    assert texts(small.train_rows) == everything[:200]  # the rows that a run of this size has anyway
    assert texts(small.dev_rows) == everything[-300:]
