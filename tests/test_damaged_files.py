"""Truncated, bit-flipped and foreign files are refused with one sentence, and nothing in a file can run code."""

import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.runs.stopping import read_state, write_state
from tests.helpers.commands import assert_sentence, ran

SHARED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def damages(draw, names):
    """The name of a file and what happens to its bytes."""
    kind = draw(st.sampled_from(["cut", "flip", "replace", "append"]))
    where, bit = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7))
    texts = [b"", b"{}", b"[]", b"null", b"1e999", b"[" * 10_000, b"\x80\x04N."]
    other = draw(st.binary(max_size=40) | st.sampled_from(texts))

    def damage(data):
        index = int(where * len(data))
        if kind == "cut":
            return data[:index]
        if kind == "flip":
            return data[:index] + bytes([data[index] ^ (1 << bit)]) + data[index + 1 :]
        return other if kind == "replace" else data + other

    return draw(st.sampled_from(names)), damage


class Bomb:
    """Leaves a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "provider"
    inner = attnreg.GNetProvider(vocab_size=5, hidden_size=4, num_layers=1)
    (inner & attnreg.BernoulliScheduleProvider([(0, 0.5), (1, 0)], 10)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "checkpoints"
    write_state(folder, 3, {"a": {"w": torch.randn(3, 4)}, 1: [1.5, None, "text", {"x": torch.arange(3)}]})
    return folder


def damaged(folder, name, damage):
    """Damage a copy's file; false if that changes nothing."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    file = next(copy.rglob(name))
    before = file.read_bytes()
    file.write_bytes(damage(before))
    return copy if file.read_bytes() != before else None


LOADED = {
    "provider": (attnreg.Regularizer.from_pretrained, "Cannot load a provider"),
    "checkpoints": (read_state, r"The checkpoint .* is damaged \(start in a new folder\): "),
}


@pytest.mark.parametrize("what", LOADED)
@SHARED
@given(data=st.data())
def test_damaged_files(request, what, data):
    names = {"provider": ["config.json", "model.safetensors"], "checkpoints": ["state.pt"]}
    load, says = LOADED[what]
    copy = damaged(request.getfixturevalue(what), *data.draw(damages(names[what])))
    if copy is not None:
        with pytest.raises(InputError, match=says) as error:
            load(copy)
        assert "\n" not in str(error.value)


@SHARED
@given(damage=damages(["SHA256SUMS"]))
def test_damaged_checksums(checkpoints, damage):
    copy = damaged(checkpoints, *damage)
    if copy is not None:
        with suppress(InputError):  # a line too few checks a file too few
            assert read_state(copy).keys() == {"a", 1}


@SHARED
@given(damage=damages(["config.json", "model.safetensors"]))
def test_a_damaged_provider_without_checksums_is_refused_or_of_a_known_class(provider, damage):
    copy = damaged(provider, *damage)
    if copy is not None:
        (copy / "SHA256SUMS").unlink()
        with suppress(ValueError):
            assert type(attnreg.Regularizer.from_pretrained(copy)).__module__.startswith("attnreg.")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_is_not_opened(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = damaged(checkpoints, "state.pt", lambda data: pickle.dumps(Bomb()))
    sums, state = next(copy.rglob("SHA256SUMS")), next(copy.rglob("state.pt"))
    for change in (lambda: None, sums.unlink, lambda: torch.save({"w": Bomb()}, state)):
        change()
        with pytest.raises(InputError):
            read_state(copy)
    assert not Path("exploded").exists()


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path):
    write_state(tmp_path, 3, {"w": torch.ones(2)})
    with pytest.raises(TypeError, match=r"A state of tensors and plain values cannot hold pathlib\.\w*Path"):
        write_state(tmp_path, 4, {"file": Path("x")})
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000003"]


def test_a_whole_checkpoint_of_something_else(cli, tmp_path):
    args = ["recipe", "finetune", "--epochs", 1, "--train-size", 64, "--output-dir", "out"]
    ran(cli(*args))
    write_state(tmp_path / "out" / "checkpoints", 9, {"weights": torch.ones(2), "rng": [0]})
    assert_sentence(cli(*args, "--resume"), 1, "The checkpoint in out/checkpoints does not fit this run")


CONFIG = {
    "[]": "Expected a run folder, got out: it has no config.json with a run's options",
    "{": "Cannot read the run's options",
    '{"recipe": "finetune", "own": 3}': "Expected a run folder, got out",
    "{}": "Expected a run folder, got out",
    '{"recipe": "finetune"}': "repeat it with",
}


@pytest.mark.parametrize("text", CONFIG)
def test_a_run_folder_with_a_foreign_config(cli, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(text)
    result = cli("recipe", "finetune", "--epochs", 1, "--output-dir", "out", "--resume")
    assert_sentence(result, 1, CONFIG[text])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    (tmp_path / "all" / "finetune").mkdir(parents=True)
    (tmp_path / "all" / "study.json").write_text("{}")
    (tmp_path / "out").rename(tmp_path / "all" / "finetune" / "seed0")
    result = cli("compare", "finetune", "--seeds", 1, "--epochs", 1, "--dry-run", "--output-dir", "all")
    if "repeat it" in CONFIG[text]:  # a run of other options that has kept nothing starts over
        ran(result)
    else:
        assert_sentence(result, 1, CONFIG[text].replace("out", "all/finetune/seed0"))


def test_predict_with_a_run_whose_config_is_cut(cli, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{")
    (tmp_path / "new.csv").write_text("text\nthe boy\n")
    assert_sentence(cli("predict", "out", "new.csv"), 1, "Cannot read the run's options in out/config.json: ")


def test_a_finished_run_with_a_damaged_file_is_refused(cli, tmp_path):
    args = ["recipe", "finetune", "--epochs", 1, "--train-size", 64, "--output-dir", "out"]
    ran(cli(*args))
    for name in ("metrics.jsonl", "telemetry.jsonl", "predictions.jsonl", "result.json"):
        text = (tmp_path / "out" / name).read_text()
        (tmp_path / "out" / name).write_text(text.replace("1", "2", 1))
        for command in ([*args, "--resume"], ["plot", "out"]):
            assert_sentence(cli(*command), 1, f"The finished run in out has been changed: {name} has changed since")
        (tmp_path / "out" / name).write_text(text)
    ran(cli(*args, "--resume"))
