"""Measure the time and memory of AD-DROP relative to plain fine-tuning.

Usage: python benchmarks/ad_drop.py [--rounds N] [--no-integrated] [--small]

All arms run in turn in one process, so that other load on the machine affects them equally. The table shows the median
step times and their ratio to plain fine-tuning. Peak memory is measured in a fresh process per arm: of the first pass,
or of plain fine-tuning's forward and backward pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as hf

import attnreg
from attnreg.training import FineTuning, TwoPass, adamw

BATCH, LENGTH = 8, 128
Step = Callable[[], object]


def model_and_batch(small: bool, attention: str = "sdpa") -> tuple[hf.BertForSequenceClassification, dict]:
    """Make a model of BERT-base's shape with random weights, and a batch without padding."""
    torch.manual_seed(0)
    size = (
        {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
        if small
        else {}
    )
    config = hf.BertConfig(**size, attn_implementation=attention)
    batch = {
        "input_ids": torch.randint(1000, 30000, (BATCH, LENGTH)),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        "labels": torch.randint(0, 2, (BATCH,)),
    }
    return hf.BertForSequenceClassification(config), batch


class OneBackwardPassPerLayer(attnreg.AttributionProvider):
    """AD-DROP as the official code computes it: with dropout and weight gradients, a backward pass for each layer."""

    def attribute(self, model: torch.nn.Module, batch: dict) -> None:
        """Run the first pass."""
        self.clear()
        with attnreg.injection.handle_of(model, self).disabled():
            output = model(**batch, output_attentions=True)
        score = output.logits.max(-1).values.sum()
        for layer, weights in enumerate(output.attentions):
            self.attributions[f"encoder.{layer}"] = torch.autograd.grad(score, weights, retain_graph=True)[0]
        self._passes.made_first(batch)


def plain(small: bool) -> tuple[Step, Step]:
    """Return a plain training step, and its forward and backward pass."""
    model, batch = model_and_batch(small)
    method = FineTuning(model, adamw(model, 5e-5))
    return lambda: method.step(batch), lambda: model.train()(**batch).loss.backward()


def two_pass(small: bool, attention: str = "sdpa", official: bool = False, **options: object) -> tuple[Step, Step]:
    """Return a training step under AD-DROP, and its first pass."""
    model, batch = model_and_batch(small, attention)
    provider = (OneBackwardPassPerLayer if official else attnreg.AttributionProvider)(**options)
    method = TwoPass(model, adamw(model, 5e-5), provider)
    return lambda: method.step(batch), lambda: provider.attribute(model.train(), batch)


ARMS: dict[str, Callable[[bool], tuple[Step, Step]]] = {
    "plain fine-tuning": plain,
    "gradient, layer 0": lambda small: two_pass(small, layers=[0]),
    "gradient, all layers": lambda small: two_pass(small),
    "gradient, layer 0, first pass in bfloat16": lambda small: two_pass(small, layers=[0], first_pass_dtype="bfloat16"),
    "gradient, all layers, first pass in bfloat16": lambda small: two_pass(small, first_pass_dtype="bfloat16"),
    "a backward pass per layer (official code)": lambda small: two_pass(small, "eager", official=True),
}
INTEGRATED: dict[str, Callable[[bool], tuple[Step, Step]]] = {
    f"integrated gradients, layer 0, 20 steps, {n} at once": lambda small, n=n: two_pass(
        small, layers=[0], method="integrated_gradients", steps_per_forward=n
    )
    for n in (1, 20)
}


def timed(step: Step) -> float:
    """Return the duration of a step in seconds."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def peak_memory(name: str, small: bool, threads: int, queue: multiprocessing.Queue) -> None:
    """Put the peak growth of the process during the first pass (or plain fine-tuning's passes) in the queue, in MiB."""
    torch.set_num_threads(threads)
    _, run = {**ARMS, **INTEGRATED}[name](small)
    hf.BertForSequenceClassification(hf.BertConfig(num_hidden_layers=1))  # make torch's initial allocations now
    import captum.attr  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
    before = _status("VmRSS")
    run()
    queue.put((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    """Measure all arms and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-integrated", action="store_true", help="omit integrated gradients")
    parser.add_argument("--small", action="store_true", help="use a tiny model, to test the script")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    steps = {name: make(options.small)[0] for name, make in ARMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(options.rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step))
    steps.clear()
    for name, make in () if options.no_integrated else INTEGRATED.items():
        seconds[name] = [timed(make(options.small)[0])]

    memory = {}
    context = multiprocessing.get_context("spawn")
    for name in seconds:
        queue = context.Queue()
        process = context.Process(target=peak_memory, args=(name, options.small, options.threads, queue))
        process.start()
        memory[name] = queue.get()
        process.join()

    base = statistics.median(seconds["plain fine-tuning"])
    print(f"torch {torch.__version__}, {platform.machine()}, {options.threads} threads, {options.rounds} rounds")
    print("| step | median (s) | over plain | range (s) | peak memory (MiB) |\n| --- | ---: | ---: | ---: | ---: |")
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"| {name} | {median:.2f} | {median / base:.2f} | {spread} | {memory[name]:.0f} |")


if __name__ == "__main__":
    main()
