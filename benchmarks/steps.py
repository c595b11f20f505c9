"""What each regularizer costs over a plain SDPA fine-tuning step of the same model, batch and optimizer.

Usage: python benchmarks/steps.py [--shape base|minilm|tiny] [--rounds N] [--threads N]

All arms run in one process, in turn, so that whatever else the machine does meets them alike. The table shows the
medians of each arm's times and the median of its ratios to the plain step of the same round, with the middle half of
them. Peak memory is measured once per arm, each in a fresh process: what the process grows by over two rounds of
training steps.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable

import torch
import transformers as hf
from common import SHAPES, Shape, grown, timed

import attnreg
from attnreg.training import AttackerDefender, FineTuning, TrainingMethod, TwoPass, adamw

T = 8
LEARNING_RATE = 5e-5
Arm = Callable[[Shape], tuple[Callable[[], object], int]]  # what to time, and how many steps it is


def plain(shape: Shape) -> tuple[Callable[[], object], int]:
    """Plain fine-tuning."""
    model, batch = shape.model(), shape.batch()
    return _step(FineTuning(model, adamw(model, LEARNING_RATE)), batch)


def under(make: Callable[[hf.PreTrainedModel], attnreg.MaskProvider]) -> Arm:
    """Fine-tuning under a provider."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(), shape.batch()
        return _step(FineTuning(model, adamw(model, LEARNING_RATE), make(model)), batch)

    return arm


def ad_drop(**options: object) -> Arm:
    """AD-DROP in every step."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(), shape.batch()
        return _step(TwoPass(model, adamw(model, LEARNING_RATE), attnreg.AttributionProvider(**options)), batch)

    return arm


def attendout(steps: int = T, **options: object) -> Arm:
    """A round of AttendOut: both networks, G's masks and update, scores on as many rows as a step has, copying."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(), shape.batch()
        heads = model.config.num_attention_heads
        game = AttackerDefender(
            model,
            attnreg.GNetProvider.for_model(model, masks_per_layer=heads),
            lambda network: adamw(network, LEARNING_RATE),
            reward_batches=[shape.batch(seed=1)],
            steps_per_round=steps,
            **options,
        )

        def a_round() -> None:
            for _ in range(steps):
                game.step(batch)

        return a_round, steps

    return arm


def evaluation(attached: bool) -> Arm:
    """A forward pass in eval mode."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model().eval(), shape.batch()
        if attached:
            attnreg.attach(model, attnreg.AttentionDropout(0.1, "scores"))
        return torch.inference_mode()(lambda: model(**batch)), 1

    return arm


def _step(method: TrainingMethod, batch: dict[str, torch.Tensor]) -> tuple[Callable[[], object], int]:
    return lambda: method.step(batch), 1


def asleep(model: hf.PreTrainedModel) -> attnreg.MaskProvider:
    """A provider that does not act in this epoch."""
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
    "AD-DROP, pass 1 in bfloat16": (ad_drop(first_pass_dtype="bfloat16"), plain),
    "AttendOut, a step of a round": (attendout(), plain),
}
MEMORY: dict[str, Arm] = {
    "plain": plain,
    **{name: arm for name, (arm, base) in ARMS.items() if base is plain},
    "AttendOut, T = 1": attendout(1),
    "AttendOut, T = 64": attendout(64),
}


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="arms with this in their name")
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    arms = {name: pair for name, pair in ARMS.items() if not options.only or options.only in name}

    print(
        f"{shape}, {options.threads} threads, torch {torch.__version__}, {platform.processor() or platform.machine()}\n"
    )
    print("| step | seconds | over plain | middle half of the ratios |\n| --- | ---: | ---: | ---: |")
    for name, pair in arms.items():
        (run, steps), (base, _) = (make(shape) for make in pair)
        run(), base()
        seconds, ratios = [], []
        for _ in range(options.rounds):
            before, mine, after = timed(base), timed(run) / steps, timed(base)
            seconds.append(mine)
            ratios.append(mine / ((before + after) / 2))
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {statistics.median(seconds):.3f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)
    if options.no_memory:
        return
    print("\n| training | memory grows by (MiB) | over plain |\n| --- | ---: | ---: |")
    base_memory = 0.0
    for name, make in MEMORY.items():
        memory = grown(lambda make=make: make(shape)[0], rounds=2, threads=options.threads)
        base_memory = base_memory or memory
        print(f"| {name} | {memory:.0f} | {memory / base_memory:.2f} |", flush=True)


if __name__ == "__main__":
    main()
