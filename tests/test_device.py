"""Which device is used, and what is said where there is no such device."""

import json

import pytest
import torch

from attnreg.errors import InputError
from attnreg.experiments.compare import launch
from attnreg.experiments.setup.device import choose_device, set_threads
from tests.commands import assert_sentence, ran


@pytest.fixture
def built_for_cuda(monkeypatch):
    """Torch's usual build for Linux, on a machine without a GPU or its driver."""

    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_build_for_cuda_without_a_gpu_runs_on_the_cpu(cli, built_for_cuda):
    assert choose_device() == choose_device("cpu") == torch.device("cpu")
    ran(cli("recipe", "finetune", "--epochs", 1, "--train-size", 32, "--output-dir", "out"))
    ran(cli("evaluate", "out"))
    assert_sentence(cli("evaluate", "out", "--device", "cuda"), 1, "No cuda device found. Use --device cpu")
    for name in ("foo", "cuda:1"):
        assert_sentence(cli("evaluate", "out", "--device", name), 2, f"'{name}' is not one of 'cpu', 'cuda', 'mps'")


def test_an_accelerator_is_used_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert choose_device() == choose_device("mps") == torch.device("mps")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="No cuda device found"):
        choose_device("cuda")
    assert launch.usual_jobs(threads=1, on_cpu=False) == 1
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 3)
    assert launch.usual_jobs(threads=1, on_cpu=True) == 3


@pytest.mark.parametrize("name", ["foo", "cuda:1", "accelerator", ""])
def test_other_names_are_refused(name):
    hint = r" To choose a GPU, set CUDA_VISIBLE_DEVICES\." if name == "cuda:1" else ""
    with pytest.raises(
        InputError, match=rf"^No {name} device found\. Use --device cpu, or leave --device out\.{hint}$"
    ):
        choose_device(name)


def test_a_small_model_trains_with_one_thread_unless_told_otherwise(cli, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    few = ("recipe", "finetune", "--epochs", 1, "--train-size", 32, "--device", "cpu")
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        for threads, options, variable in ((1, (), None), (3, ("--threads", 3), None), (2, (), "2")):
            torch.set_num_threads(2)
            if variable is not None:
                monkeypatch.setenv("OMP_NUM_THREADS", variable)
            out = f"out{threads}"
            ran(cli(*few, *options, "--output-dir", out))
            assert json.loads((tmp_path / out / "result.json").read_text())["environment"]["threads"] == threads
            assert f"CPU threads: {threads} (--threads)." in (tmp_path / out / "report.md").read_text()
        monkeypatch.delenv("OMP_NUM_THREADS")
        torch.set_num_threads(2)
        assert set_threads(None, 5_000_001) == 2
    finally:
        torch.set_num_threads(before)
