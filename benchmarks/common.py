"""Models, batches, and measurements of time and memory for the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of a batch."""

    name: str
    hidden: int
    layers: int
    heads: int
    batch_size: int
    length: int

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
        return hf.BertForSequenceClassification(config)

    def batch(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Make a batch of random tokens without padding."""
        draw = torch.Generator().manual_seed(seed)
        return {
            "input_ids": torch.randint(1000, 30000, (self.batch_size, self.length), generator=draw),
            "attention_mask": torch.ones(self.batch_size, self.length, dtype=torch.long),
            "labels": torch.randint(0, 2, (self.batch_size,), generator=draw),
        }

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
    return CLOCKS[clock]() - begin


def grown(make: Callable[[], tuple[Callable[[], object], int]]) -> float:
    """Return the peak growth of this process over at least two steps, in MiB. Call it once per fresh process."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
    run, steps = make()
    for _ in range(1 if steps > 1 else 2):
        run()
    return (status("VmHWM") - before) / 1024


def status(field: str) -> int:
    """Return a field of this process's status, such as "VmRSS" or "VmHWM" (its peak), in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
