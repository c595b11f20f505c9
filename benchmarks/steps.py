"""Measure a training step under each regularizer relative to a plain SDPA step of the same model, batch and optimizer.

Usage: python benchmarks/steps.py [--shape base|minilm|tiny] [--rounds N] [--threads N] [--mixed-precision bf16]
                                  [--device cuda]
       python benchmarks/steps.py --smallest    # every row once, at a tiny size, to test the script

Each arm alternates with plain steps in one process, so that other load on the machine affects both equally. The table
shows the median time, and the median and middle half of the ratios to the mean of the plain steps before and after.
Where users can write the same step by hand, it runs in turn with the arm, and the last column has the ratio of both
medians. Peak memory is the growth of a fresh process per arm during a few steps.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from arms import LONG, MEMORY, ON_GPUS, ROWS, Arm, Row
from common import CLOCKS, DEVICES, SHAPES, Shape, grown, hardware, timed

from attnreg.experiments.fit.tries import times_float32


def ratios_to(
    base: Callable[[], object], arms: Sequence[tuple[Callable[[], object], int]], rounds: int, clock: str
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of each arm's steps, and the ratios of each to the mean of the plain steps around it."""
    for run, _ in ((base, 1), *arms):
        run()
    seconds: list[list[float]] = [[] for _ in arms]
    ratios: list[list[float]] = [[] for _ in arms]
    before = timed(base, clock)
    for _ in range(rounds):
        for number, (run, steps) in enumerate(arms):
            seconds[number].append(timed(run, clock) / steps)
            after = timed(base, clock)
            ratios[number].append(2 * seconds[number][-1] / (before + after))
            before = after
    return seconds, ratios


def measured(row: Row, shape: Shape, rounds: int, clock: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds and ratios of a row's arm, and of the same steps by hand."""
    base, _ = row.base(shape)
    return ratios_to(base, [arm(shape) for arm in (row.arm, *row.by_hand.values())], rounds, clock)


def line(name: str, row: Row, shape: Shape, rounds: int, clock: str) -> str:
    """Measure a row of the table."""
    seconds, ratios = measured(row, shape, rounds, clock)
    own, *theirs = (statistics.median(each) for each in ratios)
    found = sorted(ratios[0])
    middle = f"{found[len(found) // 4]:.2f} to {found[-1 - len(found) // 4]:.2f}"
    peers = ", ".join(f"{own / each:.2f} ({peer})" for peer, each in zip(row.by_hand, theirs, strict=True))
    return f"| {name} | {statistics.median(seconds[0]):.3f} | {own:.2f} | {middle} | {peers} |"


def some_steps(make: Arm, shape: Shape) -> None:
    """Make an arm, and run it for at least two steps."""
    run, steps = make(shape)
    for _ in range(1 if steps > 1 else 2):
        run()


def main() -> None:
    """Measure all arms and print the tables of time and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: time on the processor, for a busy machine and one thread"
    )
    parser.add_argument("--only", help="run only arms whose name contains this text")
    parser.add_argument("--long", action="store_true", help="also run integrated gradients, 10 to 20 times as long")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--smallest", action="store_true", help="a tiny model, one round, memory of the first row")
    parser.add_argument("--memory-of", choices=MEMORY, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.shape, options.rounds, options.threads, options.long = "tiny", 1, 1, True
    torch.set_num_threads(options.threads)
    Accelerator(
        cpu=options.device == "cpu", mixed_precision=options.mixed_precision
    )  # later Accelerator() calls share this state
    shape = replace(SHAPES[options.shape], device=options.device)
    if options.memory_of:
        print(grown(lambda: some_steps(MEMORY[options.memory_of], shape), options.device))
        return

    print(f"{shape}, {hardware(options.device)}, {options.threads} threads, precision {options.mixed_precision}")
    print(f"A product of matrices in bfloat16 takes {times_float32(torch.bfloat16):.2f} times float32's on this CPU.\n")
    print("| step | seconds | over plain | ratios of | over by hand |\n| --- | ---: | ---: | ---: | --- |")
    for name, row in {
        **ROWS,
        **(ON_GPUS if options.device == "cuda" else {}),
        **(LONG if options.long else {}),
    }.items():
        if not options.only or options.only in name:
            print(line(name, row, shape, options.rounds, options.clock), flush=True)
    if options.no_memory:
        return
    print("\n| training | memory grows by (MiB) | over plain |\n| --- | ---: | ---: |")
    base_memory = 0.0
    for name in list(MEMORY)[: 1 if options.smallest else None]:
        words = ["--shape", options.shape, "--threads", str(options.threads), "--memory-of", name]
        words += ["--mixed-precision", options.mixed_precision, "--device", options.device]
        memory = float(subprocess.check_output([sys.executable, __file__, *words], text=True))
        base_memory = base_memory or memory
        print(f"| {name} | {memory:.0f} | {memory / base_memory:.2f} |", flush=True)


if __name__ == "__main__":
    main()
