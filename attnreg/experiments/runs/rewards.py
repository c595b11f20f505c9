"""The reward data of AttendOut: the rows on which the Generator's work is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from attnreg.attendout.referee import RewardBatches
from attnreg.attendout.rewards import MetricScore, Score
from attnreg.errors import UsageError
from attnreg.experiments.setup.setup import Setup

RewardData = Literal["held-out", "dev", "half-dev", "train", "noisy-train"]
ROUNDS, FEW_ROUNDS, LONGEST_ROUND = 30, 10, 8


def plan_rounds(steps: int, round_steps: int | None = None) -> tuple[int, int]:
    """Return the steps of a round and the number of rounds of a game, the last of which may be shorter.

    Args:
        steps: steps of the game.
        round_steps: steps of a round; by default 8, or fewer for 30 rounds.

    Raises:
        UsageError: if no step is left for the game.

    Example:
        >>> plan_rounds(450), plan_rounds(100), plan_rounds(100, 40)
        ((8, 57), (3, 34), (40, 3))
    """
    if steps < 1:
        raise UsageError("No step is left for the game: raise --game or --epochs, or lower --warmup.")
    chosen = round_steps or max(1, min(LONGEST_ROUND, steps // ROUNDS))
    return chosen, math.ceil(steps / chosen)


def too_few(rounds: int) -> str | None:
    """Return a warning if a game has too few rounds, with the options that change it."""
    if rounds >= FEW_ROUNDS:
        return None
    return (
        f"Warning: the game has only {rounds} round{'s' * (rounds > 1)}, too few for the Generator to learn: raise "
        "--game or --epochs, or lower --round-steps, --warmup or --batch-size."
    )


@dataclass(frozen=True)
class Rewards:
    """Reward data of one run.

    Args:
        batches: the ``reward_batches`` of :class:`attnreg.training.AttackerDefender`.
        noise: its ``reward_noise``.
        note: a sentence for the report, if the scores are biased.
    """

    batches: RewardBatches | None
    noise: float = 0.0
    note: str | None = None


def choose_rewards(run: Setup, data: RewardData, rows: int, fresh: int | None, noise: float, epochs: int) -> Rewards:
    """Choose the rows that rounds are scored on.

    Args:
        run: the run.
        data: which rows.
        rows: number of rows to hold out.
        fresh: draw this many of them anew for each round.
        noise: share of tokens to replace, for ``"noisy-train"``.
        epochs: number of epochs in which held-out rows are not trained on.

    Raises:
        UsageError: if two options do not fit together.
    """
    if data in ("train", "noisy-train"):
        if fresh is not None:
            raise UsageError(f"--fresh-rows needs rows besides the round's own: remove it for --reward-data {data}.")
        return Rewards(None, noise if data == "noisy-train" else 0.0)
    note = None
    if data == "held-out":
        chosen = run.hold_out_rows(min(rows, max(1, len(run.train_rows) // 10)), epochs)
    elif data == "dev":
        chosen = run.dev_rows
        note = "Warning: rewards came from the dev set (--reward-data dev), so the dev scores are not held out."
    else:
        if run.kind.has_windows:
            raise UsageError("--reward-data half-dev would divide windows of the same question: use held-out.")
        shuffled = run.dev_rows.shuffle(seed=0)
        half = len(shuffled) // 2
        if not half:
            raise UsageError("--reward-data half-dev needs at least two dev rows.")
        chosen = shuffled.select(range(half))
        run.further["unseen"] = run.labelled(shuffled.select(range(half, len(shuffled))))
        note = (
            "Warning: rewards came from half of the dev set (--reward-data half-dev), so the dev scores are not held "
            "out. Those of the other half begin with unseen_ in result.json."
        )
    if fresh is None:
        return Rewards(run.rows_in_order(chosen), note=note)
    if fresh > len(chosen):
        raise UsageError(f"Expected --fresh-rows of at most {len(chosen)}, the number of reward rows, got {fresh}.")

    def drawn(number: int) -> Any:
        generator = torch.Generator().manual_seed(run.settings.seed * 1_000_003 + number)
        return run.rows_in_order(chosen.select(torch.randperm(len(chosen), generator=generator)[:fresh].tolist()))

    return Rewards(drawn, note=note)


def metric_score(run: Setup) -> Score:
    """Return the task's first metric as a score.

    Raises:
        UsageError: if the task has several labels per row, or its answers are text.
    """
    whole = run.kind.one_class_per_row
    if not whole and not run.kind.one_number_per_row:
        raise UsageError(f"Expected --score loss for the {run.task.kind} task {run.task.name}, got metric.")

    def metric(labels: list[float], predictions: list[float]) -> float:
        records = [
            {"label": int(a) if whole else a, "prediction": int(b) if whole else b}
            for a, b in zip(labels, predictions, strict=True)
        ]
        return run.kind.score(records)[run.task.metric]

    return MetricScore(metric)
