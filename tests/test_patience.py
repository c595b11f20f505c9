"""Early stopping: when a run stops, what it returns, and which rows decide that."""

import json
import math
import random

import pytest
import torch
from safetensors.torch import load_file

from attnreg.experiments.runs.checkpoint import read_state
from attnreg.experiments.setup.stopping import Selection
from tests.commands import invoke, ran, read_lines
from tests.test_run_data import make, texts, trained_on
from tests.test_stopping import assert_goes_on, listen_to_ctrl_c  # noqa: F401 (a fixture)

SMALL = ["--epochs", 8, "--train-size", 128, "--batch-size", 32, "--device", "cpu", "--metric", "accuracy", "--keep-checkpoints"]  # fmt: skip
EARLY = {
    "finetune": ["--patience", 2],
    "attendout": ["--patience", 1, "--round-steps", 2, "--game", 0.5, "--no-baseline"],
}


def result_of(run):
    return json.loads((run / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run of each recipe that stops early by held-out rows; and fine-tuning by dev, and without patience."""
    folder = tmp_path_factory.mktemp("early")
    outputs = {}
    for recipe, options in EARLY.items():
        outputs[recipe] = ran(invoke("recipe", recipe, *SMALL, *options, "--output-dir", folder / recipe)).output
    dev = [*EARLY["finetune"], "--stop-on", "dev"]
    for name, options in {"dev": dev, "plain": []}.items():
        outputs[name] = ran(invoke("recipe", "finetune", *SMALL, *options, "--output-dir", folder / name)).output
    return folder, outputs


def expected_end(scores, patience):
    """The epochs, from 1, at which a run stops and to which it returns: counted one by one."""
    best, returned, waited = -math.inf, 0, 0
    for epoch, score in enumerate(scores, 1):
        if score > best:
            best, returned, waited = score, epoch, 0
        else:
            waited += 1
        if waited == patience:
            return epoch, returned
    return len(scores), returned


def test_a_selection_counts_as_one_by_one():
    draw = random.Random(0)
    for _ in range(200):
        scores = [draw.choice([0.1, 0.2, 0.3, 0.4, math.nan]) for _ in range(draw.randint(1, 12))]
        scores[0] = 0.2
        patience = draw.randint(1, 4)
        selection = Selection("x", patience)
        records = [{"x": score} for score in scores]
        seen = next((n for n in range(1, len(records)) if selection.is_over(records[:n])), len(records))
        assert (seen, records.index(selection.best(records[:seen])) + 1) == expected_end(scores, patience)


def test_by_dev_it_is_the_plain_run_until_it_stops(whole):
    folder, outputs = whole
    every, early = (read_lines(folder / name / "metrics.jsonl") for name in ("plain", "dev"))
    end, best = expected_end([record["accuracy"] for record in every], 2)
    assert 1 < end < 8, "choose other rows: this run does not stop early"
    assert early == every[:end]
    got = result_of(folder / "dev")
    assert got["dev"]["accuracy"] == every[best - 1]["accuracy"]
    assert got["dev"]["loss"] == every[best - 1]["loss"]
    assert got["stopping"] == {"rows": None, "score": got["dev"]["accuracy"], "last_epoch": end, "returned_epoch": best}
    assert result_of(folder / "plain")["stopping"] is None
    says = f"Stopped after epoch {end} of 8: no better score on dev rows in 2 evaluations. The network of epoch {best}"
    report = (folder / "dev" / "report.md").read_text()
    for text in (outputs["dev"], report):
        assert says in text
        assert "Warning: --stop-on dev chooses the epoch by its dev score, so this score is biased upward." in text
    assert "returned epoch" not in outputs["plain"]


@pytest.mark.parametrize("recipe", EARLY)
def test_by_held_out_rows_dev_decides_nothing(whole, recipe):
    folder, outputs = whole
    network = "attacker" if recipe == "attendout" else "model"
    records = [record for record in read_lines(folder / recipe / "metrics.jsonl") if record["network"] == network]
    end, best = expected_end([record["stopping_accuracy"] for record in records] + [0] * 8, EARLY[recipe][1])
    assert len(records) == end < 8
    got = result_of(folder / recipe)
    assert (got["stopping"]["last_epoch"], got["stopping"]["returned_epoch"]) == (end, best)
    assert got["dev"]["loss"] == records[best - 1]["loss"]
    assert got["rows"] + got["stopping"]["rows"] == 128
    assert got["stopping"]["rows"] == 12  # a tenth
    assert "no better score on 12 rows held out of train in" in outputs[recipe]
    assert "Warning: --stop-on" not in outputs[recipe]
    saved = load_file(folder / recipe / "model" / "model.safetensors")
    best_weights = read_state(folder / recipe / "checkpoints")["best"]
    assert all(torch.equal(saved[name], best_weights[name]) for name in saved)


@pytest.mark.parametrize(
    ("recipe", "when"),
    [
        pytest.param("finetune", "before the end", marks=pytest.mark.slow),
        ("finetune", "at the end"),
        pytest.param("attendout", "before the end", marks=pytest.mark.slow),
    ],
)
def test_stopped_by_hand_it_goes_on_to_the_same_end(whole, cli, tmp_path, monkeypatch, recipe, when):
    folder = whole[0] / recipe
    steps = read_lines(folder / "metrics.jsonl")[-1]["step"]
    args = ["recipe", recipe, *SMALL, *EARLY[recipe], "--output-dir", "out"]
    assert_goes_on(cli, monkeypatch, args, steps - 2 if when == "before the end" else steps, folder)
    assert read_state(tmp_path / "out/checkpoints")["best"]
    ran(cli(*args, "--resume"))  # a finished run does not go on
    assert read_lines(tmp_path / "out" / "metrics.jsonl") == read_lines(folder / "metrics.jsonl")
    assert result_of(tmp_path / "out")["dev"] == result_of(folder)["dev"]


def test_rows_to_stop_on_are_held_out_of_everything_else(tmp_path):
    plain = make(tmp_path, train_size=None)
    run = make(tmp_path, train_size=None, validation_rows=300, patience=1, stopping_rows=70)
    everything = texts(plain.train_rows)
    held = [
        tuple(ids[seen.bool()].tolist())
        for batch in run.stopping.batches
        for ids, seen in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts(run.dev_rows) == everything[-300:]
    assert held == everything[-370:-300]
    assert len(run.stopping.references) == 70
    reward = sum(len(batch["labels"]) for batch in run.rows_in_order(run.hold_out_rows(40, epochs=2)))
    assert texts(run.train_rows) == everything[:-370]
    assert [trained_on(run, epoch) for epoch in range(4)] == [len(everything) - 370 - n for n in (reward, reward, 0, 0)]
    assert make(tmp_path, patience=1, stop_on="dev").stopping is None
    assert len(make(tmp_path, train_size=None, patience=1).stopping.references) == min(256, len(everything) // 10)


@pytest.mark.slow
def test_two_processes_stop_at_the_same_epoch(warm, tmp_path):
    args = ["-m", "attnreg", "recipe", "finetune", *SMALL, *EARLY["finetune"], "--output-dir"]
    for processes in (1, 2):
        code, output = warm.run(*args, f"out{processes}", cwd=tmp_path, timeout=200, processes=processes)
        assert code == 0, output
        assert output.count("Stopped after epoch") == 1
    one, two = (result_of(tmp_path / f"out{processes}")["stopping"] for processes in (1, 2))
    assert one["rows"] == two["rows"]
    records = read_lines(tmp_path / "out2" / "metrics.jsonl")
    end, best = expected_end([record["stopping_accuracy"] for record in records] + [0] * 8, 2)
    assert (two["last_epoch"], two["returned_epoch"]) == (end, best)
