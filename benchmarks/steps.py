"""Measure a training step under each regularizer relative to a plain SDPA step of the same model, batch and optimizer.

Usage: python benchmarks/steps.py [--shape base|minilm|tiny] [--rounds N] [--threads N] [--mixed-precision bf16]

Each arm alternates with plain steps in one process, so that other load on the machine affects both equally. The table
shows the median time, and the median and middle half of the ratios to the mean of the plain steps before and after.
Peak memory is the growth of a fresh process per arm during a few steps.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from accelerate import Accelerator
from common import SHAPES, Shape, grown, timed

import attnreg
from attnreg.training import AttackerDefender, FineTuning, TrainingMethod, TwoPass, adamw

T = 8
LEARNING_RATE = 5e-5
Arm = Callable[[Shape], tuple[Callable[[], object], int]]  # the call to time, and how many steps it makes


def plain(shape: Shape) -> tuple[Callable[[], object], int]:
    """Return a plain fine-tuning step."""
    model, batch = shape.model(), shape.batch()
    return _step(FineTuning(model, adamw(model, LEARNING_RATE), accelerator=Accelerator()), batch)


def under(make: Callable[[hf.PreTrainedModel], attnreg.MaskProvider]) -> Arm:
    """Return an arm that fine-tunes under a provider."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(), shape.batch()
        return _step(FineTuning(model, adamw(model, LEARNING_RATE), make(model), accelerator=Accelerator()), batch)

    return arm


def ad_drop(**options: object) -> Arm:
    """Return an arm with AD-DROP in every step."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(), shape.batch()
        provider = attnreg.AttributionProvider(**options)
        return _step(TwoPass(model, adamw(model, LEARNING_RATE), provider, accelerator=Accelerator()), batch)

    return arm


def attendout(steps: int = T, generator_options: dict[str, Any] | None = None, **options: Any) -> Arm:
    """Return an arm with one round of AttendOut, scored on as many rows as one step has."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(), shape.batch()
        heads = model.config.num_attention_heads
        game = AttackerDefender(
            model,
            attnreg.GNetProvider.for_model(model, **(generator_options or {"masks_per_layer": heads})),
            lambda network: adamw(network, LEARNING_RATE),
            reward_batches=[shape.batch(seed=1)],
            steps_per_round=steps,
            accelerator=Accelerator(),
            **options,
        )

        def a_round() -> None:
            for _ in range(steps):
                game.step(batch)

        return a_round, steps

    return arm


def evaluation(attached: bool) -> Arm:
    """Return an arm with a forward pass in eval mode."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model().eval(), shape.batch()
        if attached:
            attnreg.attach(model, attnreg.AttentionDropout(0.1, "scores"))

        @torch.inference_mode()
        def forward() -> None:
            with Accelerator().autocast():
                model(**batch)

        return forward, 1

    return arm


def _step(method: TrainingMethod, batch: dict[str, torch.Tensor]) -> tuple[Callable[[], object], int]:
    return lambda: method.step(batch), 1


def asleep(model: hf.PreTrainedModel) -> attnreg.MaskProvider:
    """Make a provider that is not active in the first epoch."""
    return attnreg.CrossTuning(attnreg.AttentionDropout(0.1, "scores"))


ARMS: dict[str, tuple[Arm, Arm]] = {
    "attached, not active": (under(asleep), plain),
    "eval mode": (evaluation(True), evaluation(False)),
    "AttentionDropout, weights": (under(lambda m: attnreg.AttentionDropout(0.1)), plain),
    "AttentionDropout, scores": (under(lambda m: attnreg.AttentionDropout(0.1, "scores")), plain),
    "BernoulliSchedule": (under(lambda m: attnreg.BernoulliScheduleProvider([(0, 0.3), (1, 0)], 100)), plain),
    "AttentionLayerDrop, p = 1": (under(lambda m: attnreg.AttentionLayerDrop(1.0)), plain),
    "AttentionLayerDrop, p = 0.2": (under(lambda m: attnreg.AttentionLayerDrop(0.2)), plain),
    "AD-DROP, gradient, all layers": (ad_drop(), plain),
    "AD-DROP, gradient, first pass in bfloat16": (ad_drop(first_pass_dtype="bfloat16"), plain),
    "AttendOut, a step of a round": (attendout(), plain),
    "AttendOut, antithetic": (attendout(antithetic=True), plain),
    "AttendOut, rewards per sample": (attendout(reward_per="sample"), plain),
    "AttendOut, credit by gradient, per key": (
        attendout(generator_options={"decisions": "key"}, credit="gradient"),
        plain,
    ),
}
MEMORY: dict[str, Arm] = {
    "plain": plain,
    "AttentionDropout, scores": under(lambda m: attnreg.AttentionDropout(0.1, "scores")),
    "AD-DROP, gradient, all layers": ad_drop(),
    **{f"AttendOut, T = {steps}": attendout(steps) for steps in (1, 8, 64)},
}


def ratios_to(
    base: Callable[[], object], run: Callable[[], object], steps: int, rounds: int
) -> tuple[float, list[float]]:
    """Return the median seconds of a step, and the ratios of each step to the mean of the plain steps around it."""
    base(), run()
    seconds, before, ratios = [], timed(base), []
    for _ in range(rounds):
        seconds.append(timed(run) / steps)
        after = timed(base)
        ratios.append(2 * seconds[-1] / (before + after))
        before = after
    return statistics.median(seconds), sorted(ratios)


def main() -> None:
    """Measure all arms and print the tables of time and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--only", help="run only arms whose name contains this text")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-of", choices=MEMORY, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Accelerator(cpu=True, mixed_precision=options.mixed_precision)  # later Accelerator() calls share this state
    shape = SHAPES[options.shape]
    if options.memory_of:
        print(grown(lambda: MEMORY[options.memory_of](shape)))
        return

    print(f"{shape}, {options.threads} threads, precision {options.mixed_precision}, torch {torch.__version__}\n")
    print("| step | seconds | over plain | ratios of |\n| --- | ---: | ---: | ---: |")
    for name, pair in ARMS.items():
        if not options.only or options.only in name:
            (run, steps), (base, _) = (make(shape) for make in pair)
            seconds, ratios = ratios_to(base, run, steps, options.rounds)
            middle = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
            print(f"| {name} | {seconds:.3f} | {statistics.median(ratios):.2f} | {middle} |", flush=True)
    if options.no_memory:
        return
    print("\n| training | memory grows by (MiB) | over plain |\n| --- | ---: | ---: |")
    base_memory = 0.0
    for name in MEMORY:
        words = ["--shape", options.shape, "--threads", str(options.threads), "--memory-of", name]
        words += ["--mixed-precision", options.mixed_precision]
        memory = float(subprocess.check_output([sys.executable, __file__, *words], text=True))
        base_memory = base_memory or memory
        print(f"| {name} | {memory:.0f} | {memory / base_memory:.2f} |", flush=True)


if __name__ == "__main__":
    main()
