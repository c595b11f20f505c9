"""Measure the memory that attention takes in training, by length: saved for the backward pass, and at the peak.

Usage: python benchmarks/memory.py [--device cpu|cuda] [--lengths 512,2048,8192] [--path docs/results/memory.png]
       python benchmarks/memory.py --smallest --path FILE.png    # one short length, to test the script

One layer of BERT-base's width, one sample, no padding. Saved: all tensors that autograd keeps for the backward pass,
except parameters, each storage counted once; this number is exact. Peak: of the forward and backward pass, above what
was there before; on a CPU the growth of a fresh process, on a GPU ``torch.cuda.max_memory_allocated``. Each cell is
measured in a process of its own. On a CPU, a cell that would not fit is not run; what it would save follows from two
shorter lengths, because it grows with the length and its square, and is marked with ≈. The script prints both tables
and writes the picture, and beside it the numbers as CSV.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf
from arms import scores, weights
from by_hand import P
from common import DEVICES, Shape, grown, hardware

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.results.plots.style import picture, styles
from attnreg.experiments.setup.device import choose_device

MIB = 2**20
VOCABULARY = 1000  # small, so that embeddings do not hide the rest
PATH = Path(__file__).parents[1] / "docs" / "results" / "memory.png"
LENGTHS = {"cpu": [512, 2048, 8192], "cuda": [512, 2048, 8192, 32768]}


@dataclass(frozen=True)
class Arm:
    """A way to compute attention in training."""

    attention: str
    own_dropout: float = 0.0
    provider: Callable[[hf.PreTrainedModel], attnreg.Regularizer] | None = None


ARMS = {
    "SDPA, no attention dropout": Arm("sdpa"),
    "SDPA, torch's dropout_p": Arm("sdpa", own_dropout=P),
    "SDPA, AttentionDropout, scores": Arm("sdpa", provider=scores),
    "SDPA, AttentionDropout, weights": Arm("sdpa", provider=weights),
    "eager, its own dropout": Arm("eager", own_dropout=P),
    "flex, no attention dropout": Arm("flex_attention"),
    "flex, AttentionDropout, scores": Arm("flex_attention", provider=scores),
}


def saved_bytes(loss: Callable[[], torch.Tensor], model: torch.nn.Module) -> int:
    """Return the size of all storages that autograd saves in a forward pass, without the parameters'."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor  # the graph keeps it, so that no address is used twice

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        held = loss()
    del held
    return sum(sizes.values())


def measure(name: str, length: int, device: str, hidden: int, heads: int) -> dict[str, float]:
    """Return what an arm saves and its peak, in MiB."""
    arm = ARMS[name]
    shape = Shape("one layer", hidden, 1, heads, 1, length, device)
    own = {"attention_probs_dropout_prob": arm.own_dropout, "vocab_size": VOCABULARY, "max_position_embeddings": length}
    model = shape.model(arm.attention, **own).train()
    batch = shape.batch()
    batch["input_ids"] %= VOCABULARY
    if arm.provider is not None:
        attnreg.attach(model, arm.provider(model))

    def loss(size: int = length) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # fused kernels of GPUs need 16 bits
            return model(**{key: value[:, :size] if value.dim() > 1 else value for key, value in batch.items()}).loss

    # The first pass makes gradients and workspaces; on a GPU, it also compiles flex's kernels, which depends on sizes.
    loss(length if device == "cuda" else 8).backward()
    peak = grown(lambda: loss().backward(), device)
    return {"saved": saved_bytes(loss, model) / MIB, "peak": peak}


def available() -> float:
    """Return the memory that this machine has left, in MiB."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


def in_fresh_process(name: str, length: int, device: str) -> dict[str, float] | str:
    """Measure an arm in a process of its own; return the reason if there is no result."""
    words = ["--device", device, "--lengths", str(length), "--measure", name]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if "OutOfMemoryError" in done.stderr or done.returncode < 0:
        return "out of memory"
    raise RuntimeError(done.stderr)


def measured(device: str, lengths: list[int], smallest: bool) -> dict[str, dict[int, dict[str, float] | str]]:
    """Measure all arms at all lengths."""
    found: dict[str, dict[int, dict[str, float] | str]] = {}
    for name, arm in ARMS.items():
        cells: dict[int, dict[str, float] | str] = found.setdefault(name, {})
        expected = 0.0
        for length in lengths:
            if arm.attention == "flex_attention" and device == "cpu":
                cells[length] = "needs a GPU"
            elif device == "cpu" and expected > available():
                cells[length] = fitted(cells, length)
            else:
                cells[length] = (
                    measure(name, length, device, 64, 2) if smallest else in_fresh_process(name, length, device)
                )
            if isinstance(cell := cells[length], dict) and "peak" in cell:
                following = [each for each in lengths if each > length]
                growth = (following[0] / length) ** 2 if following else 0.0
                expected = growth * max(cell["peak"], cell["saved"]) * 1.1
            print(f"{name}, {length}: {cells[length]}", file=sys.stderr, flush=True)
    return found


def fitted(cells: dict[int, dict[str, float] | str], length: int) -> dict[str, float] | str:
    """Return what a length would save, from two shorter ones."""
    known = [(each, cell["saved"]) for each, cell in cells.items() if isinstance(cell, dict)]
    if len(known) < 2:
        return "not run"
    (m, at_m), (n, at_n) = known[-2:]
    square = (at_n / n - at_m / m) / (n - m)
    return {"saved": length * (at_n / n + square * (length - n)), "fitted": 1.0}


def shown(cell: dict[str, float] | str, number: str) -> str:
    """Return the text of a cell."""
    if isinstance(cell, str):
        return cell
    return f"{'≈ ' if 'fitted' in cell else ''}{cell[number]:,.0f}" if number in cell else "not run"


def table(found: dict[str, dict[int, dict[str, float] | str]], number: str) -> str:
    """Return a Markdown table of one of the two numbers."""
    lengths = list(next(iter(found.values())))
    lines = [f"| attention | {' | '.join(map(str, lengths))} |", "| --- |" + " ---: |" * len(lengths)]
    for name, cells in found.items():
        texts = [shown(cell, number) for cell in cells.values()]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def draw(found: dict[str, dict[int, dict[str, float] | str]], path: Path) -> None:
    """Draw both numbers by length, and write them beside the picture."""
    with picture(path, width=9.0, height=4.2, columns=2) as axes:
        for one, (number, title) in zip(
            axes, (("saved", "saved for the backward pass"), ("peak", "peak of a training step")), strict=True
        ):
            for (name, cells), look in zip(found.items(), styles(), strict=False):
                points = [(x, cell[number]) for x, cell in cells.items() if isinstance(cell, dict) and number in cell]
                if points:
                    one.plot(
                        *zip(*points, strict=True), color=look.color, ls=look.linestyle, marker=look.marker, label=name
                    )
            one.set(xscale="log", yscale="log", title=title, xlabel="length in tokens", ylabel="MiB")
            lengths = list(next(iter(found.values())))
            one.set_xticks(lengths, [str(length) for length in lengths])
            one.minorticks_off()
        axes[0].legend(frameon=False, fontsize=8)
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["attention", "length", "saved_mib", "peak_mib"])
        for name, cells in found.items():
            for length, cell in cells.items():
                if isinstance(cell, dict):
                    peak = f"{cell['peak']:.1f}" if "peak" in cell else ""
                    writer.writerow([name, length, f"{cell['saved']:.1f}", peak])


def main() -> None:
    """Measure all arms, print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--lengths", help="lengths in tokens, ascending, separated by commas")
    parser.add_argument("--path", type=Path, default=PATH, help="the picture")
    parser.add_argument("--smallest", action="store_true", help="a narrow layer and one short length")
    parser.add_argument("--measure", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        choose_device(options.device)
    except InputError as error:
        parser.error(str(error))
    lengths = [int(each) for each in options.lengths.split(",")] if options.lengths else LENGTHS[options.device]
    if options.measure:
        print(json.dumps(measure(options.measure, lengths[0], options.device, 768, 12)))
        return
    found = measured(options.device, [32] if options.smallest else lengths, options.smallest)
    for number, title in (("saved", "Saved for the backward pass"), ("peak", "Peak of a training step")):
        print(f"\n{title} (MiB), {hardware(options.device)}\n\n{table(found, number)}")
    draw(found, options.path)


if __name__ == "__main__":
    main()
