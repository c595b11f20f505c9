"""Measure on a GPU what docs/cost.md has, and print the rows and tables to paste there.

Usage: python benchmarks/gpu.py [--mixed-precision bf16] [--rounds N]
       python benchmarks/gpu.py --device cpu --smallest [--only TEXT]    # the same output at a tiny size, as a test

Steps, in wall time, with those that only GPUs can make (FlexAttention, Inductor); then memory.py and compiled.py.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from arms import ON_GPUS, ROWS
from common import DEVICES, SHAPES, Shape, hardware
from steps import measured

from attnreg.errors import one_line

HERE = Path(__file__).parent
COST = HERE.parent / "docs" / "cost.md"


def documented() -> list[str]:
    """Return the steps in the table of docs/cost.md."""
    table = COST.read_text(encoding="utf-8").partition("| step |")[2].partition("\n\n")[0]
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]


def cell(name: str, shape: Shape, rounds: int) -> str:
    """Return the ratio of a step to the plain one, or why there is none."""
    try:
        _, ratios = measured((ROWS | ON_GPUS)[name], shape, rounds, "wall")
    except Exception as error:  # the others are measured all the same
        return f"{type(error).__name__}: {one_line(error)[:60]}"
    finally:
        torch._dynamo.reset()
    return f"{statistics.median(ratios[0]):.2f}"


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--only", default="", help="only steps whose name contains this text, without the other tables")
    parser.add_argument("--smallest", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("No CUDA device found. Use --device cpu --smallest to see what is printed.")
    Accelerator(cpu=options.device == "cpu", mixed_precision=options.mixed_precision)
    names = [SHAPES["tiny"]] if options.smallest else [SHAPES["base"], SHAPES["minilm"]]
    shapes = [replace(shape, device=options.device) for shape in names]
    place = hardware(options.device)
    print(f"{place}, precision {options.mixed_precision}\n")
    print(f"| step | {' | '.join(f'{shape.name}, {place}' for shape in shapes)} |\n| --- |{' ---: |' * len(shapes)}")
    for name in [*documented(), *(ON_GPUS if options.device == "cuda" else [])]:
        if options.only in name:
            cells = [cell(name, shape, 1 if options.smallest else options.rounds) for shape in shapes]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if options.only:
        return
    for script in ("memory.py", "compiled.py"):
        words = [*(["--smallest"] if options.smallest else []), "--device", options.device]
        words += ["--path", f"memory-{options.device}.png"] if script == "memory.py" else []
        print(flush=True)
        subprocess.run([sys.executable, HERE / script, *words], check=False)


if __name__ == "__main__":
    main()
