"""Kill a run at random moments, resume it, and compare its results with those of an uninterrupted run.

A checkpoint is written after each step, so that some kills happen while one is being written. Weights, optimizers,
provider, random state, the state of the game and all written results must be bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from attnreg.experiments.runs.stopping import read_state

MEASURED = rb'"(training_|training_cpu_)?(seconds|peak_memory|peak_memory_bytes)"[:,] [\d.e+-]+'  # differs between runs
OPTIONS = ["--epochs", "3", "--train-size", "256", "--save-steps", "1", "--device", "cpu", "--keep-checkpoints"]
RECIPES = {
    "attendout": ["--round-steps", "2", "--no-baseline", "--game", "1"],
    "ad-drop": [],
    "scheduled-bernoulli": [],
}


def start(recipe: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a short run."""
    words = ["recipe", recipe, *RECIPES[recipe], *OPTIONS, "--output-dir", str(folder), *more]
    command = [sys.executable, "-m", "attnreg", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def first_checkpoint(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for the first checkpoint, or the end of the process."""
    while process.poll() is None and not any((folder / "checkpoints").glob("step-*")):
        time.sleep(0.002)


def written_out(value: Any) -> Any:
    """Write the tensors of a state out as their bits."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes().hex()]
    if isinstance(value, dict):
        return {str(key): written_out(item) for key, item in value.items()}
    return [written_out(item) for item in value] if isinstance(value, (list, tuple)) else value


def end(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the results of a finished run by file, and what it should have removed."""
    files = [*folder.glob("model/*.safetensors"), folder / "result.json", *folder.glob("*.jsonl")]
    contents = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    contents["state"] = json.dumps(written_out(read_state(folder / "checkpoints"))).encode()
    left_over = sorted(file.name for file in folder.glob(".*") if file.name != ".lock")
    return {name: re.sub(MEASURED, b"", content) for name, content in contents.items()}, left_over


def main() -> None:
    """Kill, resume and compare runs, and print how many ended with the same results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--recipe", choices=RECIPES, default="attendout")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    os.environ["OMP_NUM_THREADS"] = "1"
    good = 0
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        process = start(options.recipe, whole)
        first_checkpoint(process, whole)
        begin = time.perf_counter()
        output, _ = process.communicate()
        span = time.perf_counter() - begin
        assert process.returncode == 0, output
        expected = end(whole)
        for number in range(options.kills):
            folder = Path(place) / str(number)
            process = start(options.recipe, folder)
            first_checkpoint(process, folder)
            time.sleep(moments.uniform(0, span))
            process.kill()
            process.communicate()
            at = sorted(path.name for path in (folder / "checkpoints").iterdir())
            resumed = start(options.recipe, folder, "--resume")
            output, _ = resumed.communicate()
            same = resumed.returncode == 0 and end(folder) == expected
            good += same
            outcome = "same results" if same else f"DIFFERENT RESULTS {output}"
            print(f"{number + 1}: killed with {', '.join(at)}: {outcome}", flush=True)
    print(f"{good} of {options.kills}")
    sys.exit(good != options.kills)


if __name__ == "__main__":
    main()
