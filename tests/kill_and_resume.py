"""Kill a run at random moments, resume it, and compare its results with those of an uninterrupted run.

A checkpoint is written after each step, so that some kills happen while one is being written. Weights, optimizers,
provider, random state, the state of the game and all written results must be bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

# These differ between runs.
MEASURED = {"seconds", "training_seconds", "training_cpu_seconds", "peak_memory", "peak_memory_bytes"}
RECIPES = {
    "attendout": ["--round-steps", "2", "--no-baseline", "--game", "1"],
    "ad-drop": [],
    "scheduled-bernoulli": [],
}


def start(recipe: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a short run."""
    options = [
        "--epochs",
        "3",
        "--train-size",
        "256",
        "--save-steps",
        "1",
        "--device",
        "cpu",
        "--keep-checkpoints",  # to compare the last ones
        "--output-dir",
        str(folder),
    ]
    command = [sys.executable, "-m", "attnreg", "recipe", recipe, *RECIPES[recipe], *options, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def first_checkpoint(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for the first checkpoint, or the end of the process."""
    while process.poll() is None and not any((folder / "checkpoints").glob("step-*")):
        time.sleep(0.002)


def end(folder: Path) -> dict[str, Any]:
    """Return the results of a finished run as plain data."""
    (checkpoint,) = (folder / "checkpoints").iterdir()
    found: dict[str, Any] = {
        "checkpoint": checkpoint.name,
        "state": _without_clock((checkpoint / "state.json").read_text()),
    }
    found |= {name: tensor.tobytes() for name, tensor in _arrays(checkpoint / "tensors.safetensors")}
    found |= {name: tensor.tobytes() for name, tensor in _arrays(folder / "model" / "model.safetensors")}
    for name in ("metrics.jsonl", "telemetry.jsonl", "predictions.jsonl"):
        found[name] = (folder / name).read_text()
    found["result.json"] = _without_clock((folder / "result.json").read_text())
    found["left over"] = sorted(
        path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"
    )
    return found


def _arrays(path: Path) -> Any:
    return ((f"{path.parent.name}/{name}", tensor.numpy()) for name, tensor in sorted(load_file(path).items()))


def _without_clock(text: str) -> Any:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key not in MEASURED}
        if isinstance(value, list):
            return [strip(item) for item in value if not (isinstance(item, list) and _names_a_measure(item))]
        return value

    return strip(json.loads(text))


def _names_a_measure(item: list[Any]) -> bool:
    return len(item) == 2 and isinstance(item[0], str) and item[0] in MEASURED


def main() -> None:
    """Kill, resume and compare runs, and print how many ended with the same results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--recipe", choices=RECIPES, default="attendout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smallest", action="store_true", help="kill one run, to test the script")
    options = parser.parse_args()
    options.kills = 1 if options.smallest else options.kills
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
            process.send_signal(signal.SIGKILL)
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
