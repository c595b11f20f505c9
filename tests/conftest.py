"""Fixtures: the command line in this process and in one of its own; real data where it is."""

import copy
import gc
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.commands import invoke
from tests.helpers.light import lighten, with_few_dev_rows
from tests.helpers.warm import Warm

# Nothing listens there: no test may reach a network, and finding that out must be quick.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ.pop("HF_HUB_OFFLINE", None)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; tests run in several processes


def pytest_configure():
    with_few_dev_rows()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Looking for garbage leaves alone what is imported and collected: it stays to the end, and is much."""
    gc.disable()  # or a third of the time would go into looking
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def light():
    """What tests have no use for is left out."""
    lighten()


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """Run a command in an empty working folder; gives click's result, with the exception where there was a traceback."""
    monkeypatch.chdir(tmp_path)
    return invoke


@pytest.fixture(scope="session")
def warm():
    """Starts processes that need not import anything first."""
    return Warm()


@pytest.fixture
def spawn(warm, tmp_path):
    """Start a command in a process of its own."""

    with ExitStack() as stack:

        def start(*args):
            command = [sys.executable, "-m", "attnreg", *args]
            return stack.enter_context(warm.popen(command, cwd=tmp_path, stderr=subprocess.STDOUT))

        yield start


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny BERT."""
    import torch

    from attnreg.experiments.tasks import get_task, load_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    for each in load_model(get_task("agreement")):
        each.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def made_bench(tiny):
    """A bench of a fit with a tiny model, to be copied."""
    from tests.helpers.bench import tiny_bench

    return tiny_bench(tiny)


@pytest.fixture
def bench(made_bench):
    """A bench of a fit with a tiny model."""
    return copy.deepcopy(made_bench)


@pytest.fixture
def few_rows(monkeypatch):
    """The embedded task has few rows to train on, which are soon tokenized."""
    from attnreg.experiments.tasks import agreement

    splits = agreement._splits
    monkeypatch.setattr(agreement, "_splits", lambda *of: {**splits(*of), "train": splits(*of)["train"][:600]})


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not drawn: their files are stubs."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: path.write_bytes(b"\x89PNG"))


@pytest.fixture
def real_data():
    """The folder of real data sets that stands beside a developer's checkout."""
    folder = Path(__file__).parent.parent.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data sets in {folder}")
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Folders of a tiny BERT and a tiny Llama, which know the words of ``tests.helpers.trainers``."""
    import torch
    import transformers as hf

    from tests.helpers.cases import SMALL, TEXT, tiny_bert
    from tests.helpers.trainers import WORDS

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tiny_bert(WORDS, folder / "bert")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "bert")
    tokenizer.add_special_tokens({"eos_token": "[END]"})
    tokenizer.save_pretrained(folder / "llama")
    hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, **SMALL, "vocab_size": 500})).save_pretrained(folder / "llama")
    return folder


@pytest.fixture
def eager_flex(monkeypatch):
    """FlexAttention is not compiled: that takes seconds, and is not ours to test."""
    from torch.nn.attention import flex_attention as torchs
    from transformers.integrations import flex_attention as kernels

    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(kernels, "WrappedFlexAttention", lambda training: lambda: torchs.flex_attention)


@pytest.fixture
def trainable_flex(monkeypatch):
    """Torch's check that keeps FlexAttention from computing gradients on a CPU is taken away."""
    from torch.nn.attention import flex_attention as torchs

    monkeypatch.setattr(torchs, "_validate_device", lambda *args: None)


@pytest.fixture
def patience(monkeypatch):
    """A regularizer that has no effect is told after so few training passes, instead of a hundred."""
    from attnreg.injection.running import changes, passes
    from attnreg.regularizer import abilities

    for module in (abilities, changes, passes):
        monkeypatch.setattr(module, "PATIENCE", 12)
    return 12


LONGEST = ("contract", "trainer_overrides", "runs", "stopping", "method_contract", "search", "compare", "task_runs", "fit", "trainer_search", "sweep")  # fmt: skip


def pytest_collection_modifyitems(items):
    """The files that take longest come first: no process is left alone with one of them at the end."""
    ranks = {f"test_{name}.py": rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
