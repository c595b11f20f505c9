"""Models, batches, and measurements of time and memory for the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from attnreg.experiments.setup.device import cpu_name, device_name


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of a batch."""

    name: str
    hidden: int
    layers: int
    heads: int
    batch_size: int
    length: int
    device: str = "cpu"

    def model(self, attention: str = "sdpa", **config_options: Any) -> hf.BertForSequenceClassification:
        """Make a BERT of this size with random weights."""
        torch.manual_seed(0)
        config = hf.BertConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.hidden,
            attn_implementation=attention,
            **config_options,
        )
        with torch.device(self.device):  # drawing weights there takes a fraction of the time
            return hf.BertForSequenceClassification(config)

    def batch(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Make a batch of random tokens without padding."""
        draw = torch.Generator().manual_seed(seed)
        batch = {
            "input_ids": torch.randint(1000, 30000, (self.batch_size, self.length), generator=draw),
            "attention_mask": torch.ones(self.batch_size, self.length, dtype=torch.long),
            "labels": torch.randint(0, 2, (self.batch_size,), generator=draw),
        }
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def __str__(self) -> str:
        return f"{self.name} shape, batch {self.batch_size} x {self.length}"


SHAPES = {
    "base": Shape("BERT-base", 768, 12, 12, 8, 128),
    "minilm": Shape("MiniLM", 384, 6, 12, 16, 48),
    "tiny": Shape("tiny", 64, 2, 2, 4, 16),
}


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def timed(run: Callable[[], object], clock: str = "wall") -> float:
    """Return the duration of a call in seconds, on one of :data:`CLOCKS`."""
    begin = CLOCKS[clock]()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return CLOCKS[clock]() - begin


def grown(run: Callable[[], object], device: str) -> float:
    """Return the peak growth during a call, in MiB: of a GPU's memory, or of this process, which should be fresh."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
    run()
    return (status("VmHWM") - before) / 1024


def status(field: str) -> int:
    """Return a field of this process's status, such as "VmRSS" or "VmHWM" (its peak), in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


DEVICES = ("cpu", "cuda")


def hardware(device: str) -> str:
    """Return the name of a device's hardware, and torch's version."""
    return f"{cpu_name() if device == 'cpu' else device_name(torch.device(device))}, torch {torch.__version__}"
