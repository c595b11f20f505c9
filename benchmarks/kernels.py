"""Time the kernels of attention on a GPU, beside torch's own; about 90 seconds.

Usage: python benchmarks/kernels.py [--part tune] [--part times] [--jobs N]
       python benchmarks/kernels.py --compile     # without a GPU: registers, spills and shared memory on sm_90
       python benchmarks/kernels.py --smallest    # the same output at a tiny size, as a test

`tune` tries blocks for each kernel, the others as they are, and prints the times; put the best into `CONFIGS` of
`attnreg/kernels/device/launch_attention.py`. `times` are of a forward and backward pass, in milliseconds, with the
peak of memory.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import functional, kernels
from attnreg.draws import Drawn

SEED, RATE = 11, 0.1
MODES = ("plain", "scores", "weights", "keys", "two draws", "counted", "biased")
TUNED = {
    "attend": [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2)],
    "query_gradient": [(64, 64, 4, 2), (128, 32, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2)],
    "key_gradients": [(64, 64, 4, 2), (32, 64, 4, 2), (32, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 2), (64, 64, 4, 1)],
}


class Shape(NamedTuple):
    """A batch of attention: causal, or padded."""

    batch: int
    heads: int
    shared: int
    length: int
    size: int
    causal: bool


SHAPES = [
    Shape(32, 12, 12, 128, 64, False),
    Shape(4, 32, 8, 1024, 64, True),
    Shape(2, 32, 8, 2048, 64, True),
    Shape(1, 32, 8, 8192, 64, True),
    Shape(2, 32, 8, 2048, 128, True),
]
SMALLEST = Shape(1, 2, 1, 16, 16, True)


class Inputs:
    """The tensors of a batch, and what can be timed on them."""

    def __init__(self, shape: Shape, device: str) -> None:
        """Draw them."""
        torch.manual_seed(0)
        self.shape, self.device = shape, torch.device(device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        lead = shape.batch, shape.length

        def make(heads: int) -> Tensor:
            return torch.randn(*lead, heads, shape.size, device=device, dtype=dtype).transpose(1, 2).requires_grad_()

        self.leaves = make(shape.heads), make(shape.shared), make(shape.shared)
        self.grad = torch.randn_like(self.leaves[0])
        lengths = torch.randint(shape.length // 4, shape.length + 1, (shape.batch, 1), device=device)
        self.valid = None if shape.causal else (torch.arange(shape.length, device=device) < lengths)[:, None, None]
        self.counts = torch.zeros(1, dtype=torch.int64, device=device)

    def fused(self, mode: str) -> Tensor:
        """Compute attention in a kernel."""
        batch, heads, _, length, _, causal = self.shape
        whole = batch, heads, length, length
        own = Drawn(SEED + 1, RATE, whole, rescale=True)
        options = {
            "plain": {},
            "scores": {"scores": Drawn(SEED, RATE, whole)},
            "weights": {"weights": (own,)},
            "keys": {"scores": Drawn(SEED, RATE, (batch, heads, 1, length))},
            "two draws": {"scores": Drawn(SEED, RATE, whole), "weights": (None, own)},
            "counted": {"scores": Drawn(SEED, RATE, whole), "counts": self.counts},
            "biased": {"scores": Drawn(SEED, RATE, whole)},
        }[mode]
        given: dict[str, object] = {"valid": self.valid, "causal": 0 if causal else None}
        if mode == "biased":  # as an attached model gives an additive mask of its own
            bias = torch.zeros(length, length, dtype=self.grad.dtype, device=self.device)
            shut = bias.to(torch.bool).logical_not().triu(1) if causal else ~self.valid
            given = {"bias": bias.masked_fill(shut, float("-inf"))}
        return kernels.attention(*self.leaves, **given, **options)

    def sdpa(self, *, p: float = 0.0, mask: Tensor | None = None) -> Tensor:
        """Compute attention in torch, with all heads of the keys written out under a mask of all heads."""
        query, key, value = self.leaves
        causal = self.shape.causal and mask is None
        if mask is not None:
            key, value = (functional.attention.per_head(x, self.shape.heads) for x in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, self.valid if mask is None else mask, p, causal, enable_gqa=mask is None
        )

    def mask(self) -> Tensor:
        """Draw a mask of all scores."""
        batch, heads, _, length, _, causal = self.shape
        keep = functional.seeded_keep(SEED, (batch, heads, length, length), RATE, device=self.device)
        return keep.tril_() if causal else keep & self.valid

    def rows(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Name the ways to compute attention; masks are freed before the next."""
        yield "sdpa", self.sdpa
        yield "sdpa, its own dropout", lambda: self.sdpa(p=RATE)
        ready = [self.mask()]
        yield "sdpa, a mask that is ready", lambda: self.sdpa(mask=ready[0])
        ready.clear()
        yield "sdpa, a mask that is drawn", lambda: self.sdpa(mask=self.mask())
        if kernels.runs_on(self.device):
            for mode in MODES:
                yield f"kernel, {mode}", lambda mode=mode: self.fused(mode)

    def step(self, forward: Callable[[], Tensor]) -> None:
        """Run a forward and a backward pass."""
        torch.autograd.grad(forward(), self.leaves, self.grad)


def measured(run: Callable[[], object], repeats: int = 10) -> tuple[float, float]:
    """Return milliseconds, a median, and the peak of memory in MiB above what was there."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin), 0.0
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**20


def time_all(shapes: list[Shape], device: str) -> None:
    """Print a table for each shape."""
    for shape in shapes:
        inputs, first = Inputs(shape, device), None
        print(f"\n{shape}\n| attention | ms | over sdpa | peak, MiB |\n| --- | ---: | ---: | ---: |", flush=True)
        for name, forward in inputs.rows():
            try:
                took, peak = measured(functools.partial(inputs.step, forward), 4 if shape.length > 4096 else 10)
            except torch.OutOfMemoryError:
                print(f"| {name} | out of memory |", flush=True)
                continue
            first = first or took
            print(f"| {name} | {took:.3f} | {took / first:.2f} | {peak:.0f} |", flush=True)


def tune(shapes: list[Shape], device: str) -> None:
    """Print the time of a forward, or of a backward pass, with each setting of a kernel."""
    from attnreg.kernels.device.launch_attention import CONFIGS

    for shape in shapes:
        inputs, size = Inputs(shape, device), max(64, shape.size)
        print(f"\n{shape}, ms", flush=True)
        for kernel, settings in TUNED.items():
            default, results = CONFIGS[kernel, size], {}
            for setting in dict.fromkeys((default, *settings)):
                CONFIGS[kernel, size] = setting
                try:
                    results[setting] = [spent(inputs, mode, kernel == "attend") for mode in ("plain", "scores")]
                except Exception as error:  # too large for the device, or for the other kernel
                    print(f"  {kernel} {setting} {type(error).__name__}", flush=True)
            CONFIGS[kernel, size] = default
            for setting, times in sorted(results.items(), key=lambda item: sum(item[1])):
                print(f"  {kernel} {setting} plain {times[0]:.3f} scores {times[1]:.3f}", flush=True)


def spent(inputs: Inputs, mode: str, forward: bool) -> float:
    """Return the milliseconds of a forward pass, or of a backward pass."""
    if forward:
        with torch.no_grad():
            return measured(lambda: inputs.fused(mode))[0]
    out = inputs.fused(mode)
    return measured(lambda: torch.autograd.grad(out, inputs.leaves, inputs.grad, retain_graph=True))[0]


def warm(shard: str, parts: list[str]) -> None:
    """Compile a share of what is timed into Triton's cache on disk."""
    index, count = map(int, shard.split("/"))
    jobs: list[tuple[Shape, str, dict]] = []
    for shape in (SHAPES[0]._replace(batch=1), SHAPES[1]._replace(batch=1), SHAPES[4]._replace(batch=1, length=512)):
        jobs += [(shape, mode, {}) for mode in MODES]
    if "tune" in parts:
        for size in {shape.size for shape in SHAPES[1:]}:
            shape = Shape(1, 8, 2, 512, size, True)
            for kernel, settings in TUNED.items():
                jobs += [(shape, mode, {(kernel, size): each}) for each in settings for mode in ("plain", "scores")]
    from attnreg.kernels.device.launch_attention import CONFIGS

    for shape, mode, changes in jobs[index::count]:
        before = dict(CONFIGS)
        CONFIGS.update(changes)
        try:
            inputs = Inputs(shape, "cuda")
            inputs.step(lambda inputs=inputs, mode=mode: inputs.fused(mode))
        except Exception as error:  # said again where it is timed
            print(f"  {changes or mode}: {type(error).__name__}", flush=True)
        CONFIGS.update(before)


def compile_all() -> None:
    """Compile kernels for sm_90 without a GPU, and print what they take there."""
    os.environ.pop("TRITON_INTERPRET", None)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    class Fake:
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    driver.set_active(Fake())
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    launch = jit.JITFunction.run

    # It returns nothing that could be kept, and launched directly.
    def compiled(self: object, *args: object, grid: object, warmup: bool, **options: object) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        print(f"| {label} | {self.fn.__name__} | {registers} | {stack} | {kernel.metadata.shared} |", flush=True)

    jit.JITFunction.run = compiled
    print("| case | kernel | registers | spilled, bytes | shared memory, bytes |\n| --- | --- | ---: | ---: | ---: |")
    for shape in (SHAPES[0]._replace(batch=1), SHAPES[1]._replace(batch=1), *(
        Shape(1, 8, 2, 512, size, True) for size in (80, 128, 256))):  # fmt: skip
        inputs = Inputs(shape, "cpu")
        inputs.leaves = tuple(x.detach().bfloat16().requires_grad_() for x in inputs.leaves)
        inputs.grad = inputs.grad.bfloat16()
        for mode in MODES:
            label = f"D = {shape.size}, {'causal' if shape.causal else 'padded'}, {mode}"
            inputs.step(lambda inputs=inputs, mode=mode: inputs.fused(mode))
    for keys, size, dtype in (
        (128, 64, torch.bfloat16), (512, 64, torch.bfloat16), (1024, 64, torch.bfloat16), (2048, 128, torch.bfloat16),
        (512, 64, torch.float32), (1024, 128, torch.float32),
    ):  # fmt: skip
        label = f"D = {size}, {keys} keys, {str(dtype).removeprefix('torch.')}"
        gradient, value = (torch.zeros(1, 2, length, size, dtype=dtype) for length in (64, keys))
        kernels.region(gradient, value, torch.ones(1, 1, 1, keys, dtype=torch.bool), 0.3)


def run(parts: list[str], jobs: int) -> None:
    """Compile in several processes, then time."""
    begin = time.perf_counter()
    command = [sys.executable, __file__, *(f"--part={part}" for part in parts)]
    waiting = [subprocess.Popen([*command, f"--warm={i}/{jobs}"]) for i in range(jobs)]
    failed = sum(job.wait() for job in waiting)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: compiled in {time.perf_counter() - begin:.0f} s")
    if failed:
        print("A process that compiles ended with an error.")
    if "tune" in parts:
        tune(SHAPES[1:3] + SHAPES[4:], "cuda")
    if "times" in parts:
        time_all(SHAPES, "cuda")


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=["tune", "times"], help="only this part (default: both)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = options.part or ["tune", "times"]
    if options.compile:
        compile_all()
    elif options.smallest:
        time_all([SMALLEST], "cpu")
    elif not torch.cuda.is_available():
        parser.error("No CUDA device found. Use --smallest to see what is printed, or --compile.")
    elif options.warm:
        warm(options.warm, parts)
    else:
        run(parts, options.jobs)


if __name__ == "__main__":
    main()
