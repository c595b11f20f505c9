"""AttendOut's game in a run: its rounds, and the rows that it is scored on."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from attnreg.arguments import whole_number
from attnreg.attendout.credit import Reinforce
from attnreg.attendout.rewards import MetricScore, Rewards, Score
from attnreg.errors import InputError, UsageError
from attnreg.experiments.options.provider import read_provider
from attnreg.experiments.setup.setup import Setup
from attnreg.regularizer.expressions import parse_call

RewardData = Literal["held-out", "dev", "half-dev", "train"]
ROUNDS, FEW_ROUNDS, LONGEST_ROUND = 30, 10, 8


def read_generator(text: str) -> str:
    """Check the value of ``--generator``: a provider expression, or ``none``."""
    return text if text == "none" else read_provider(text)


def credit_of(text: str) -> Reinforce:
    """Make a credit from an expression, the value of ``--credit``."""
    return parse_call(text, {"Reinforce": Reinforce})


def rewards_of(text: str) -> tuple[Any, int | None, int | str | None]:
    """Return score, batches per round and fresh rows of an expression, the value of ``--rewards``."""

    def make(
        score: Any = "loss", batches_per_round: int | None = None, fresh_rows: Any = None
    ) -> tuple[Any, int | None, int | str | None]:
        if fresh_rows not in (None, "steps"):
            whole_number("fresh_rows", fresh_rows)
        if fresh_rows and batches_per_round:
            raise InputError("`fresh_rows` are all scored in their round: remove `batches_per_round`.")
        Rewards(score="loss" if score == "metric" else score, batches_per_round=batches_per_round)  # refuses others
        return score, batches_per_round, fresh_rows

    return parse_call(text, {"Rewards": make})


def plan_rounds(steps: int, round_steps: int | None = None) -> tuple[int, int]:
    """Return the steps of a round (8 by default, or fewer for 30 rounds) and the number of rounds of a game.

    The last round may be shorter.
    """
    if steps < 1:
        raise UsageError("No step is left for the game: raise --game or --epochs, or lower --warmup.")
    steps_per_round = round_steps or max(1, min(LONGEST_ROUND, steps // ROUNDS))
    return steps_per_round, math.ceil(steps / steps_per_round)


def too_few(rounds: int) -> str | None:
    """Return a warning if a game has too few rounds, with the options that change it."""
    if rounds >= FEW_ROUNDS:
        return None
    return (
        f"Warning: the game has only {rounds} round{'s' * (rounds > 1)}, too few for the Generator to learn: raise "
        "--game or --epochs, or lower --round-steps, --warmup or --batch-size."
    )


def choose_reward_rows(run: Setup, data: RewardData, size: int, epochs: int) -> tuple[Any, str | None]:
    """Choose the rows that the rounds of a run are scored on; held-out rows are held out in these epochs.

    Returns the rows, ``None`` for the rows of the round, and a sentence for the report if the scores are biased.
    """
    if data == "train":
        return None, None
    if data == "held-out":
        return run.hold_out_rows(min(size, max(1, len(run.train_rows) // 10)), epochs), None
    if data == "dev":
        note = "Warning: rewards came from the dev set (--reward-data dev), so the dev scores are not held out."
        return run.dev_rows, note
    if run.kind.has_windows:
        raise UsageError("--reward-data half-dev would divide windows of the same question: use held-out.")
    shuffled = run.dev_rows.shuffle(seed=0)
    half = len(shuffled) // 2
    if not half:
        raise UsageError("--reward-data half-dev needs at least two dev rows.")
    run.further["unseen"] = run.labelled(shuffled.select(range(half, len(shuffled))))
    return shuffled.select(range(half)), (
        "Warning: rewards came from half of the dev set (--reward-data half-dev), so the dev scores are not held out. "
        "Scores of the other half begin with unseen_ in result.json."
    )


def rewards_from(run: Setup, rows: Any, text: str, round_steps: int) -> Rewards:
    """Return the rewards of an expression; by default, half as many batches are scored as a round has steps."""
    score, batches_per_round, fresh_rows = rewards_of(text)
    numbers, classes = run.kind.one_number_per_row, run.kind.one_class_per_row
    if (score == "accuracy" and numbers) or (score == "metric" and not (numbers or classes)):
        raise UsageError(
            f"Expected score 'loss' in --rewards for the {run.task.kind} task {run.task.name}, got {score!r}."
        )
    score = metric_score(run) if score == "metric" else score
    if fresh_rows is None:
        batches = None if rows is None else run.rows_in_order(rows)
        return Rewards(batches, score, batches_per_round or max(1, round_steps // 2))
    fresh = round_steps if isinstance(fresh_rows, str) else fresh_rows
    if rows is None:
        raise UsageError("`fresh_rows` in --rewards needs rows besides those of the round: change --reward-data.")
    if fresh > len(rows):
        raise UsageError(
            f"Expected `fresh_rows` in --rewards of at most {len(rows)}, the number of reward rows, got {fresh}."
        )

    def draw_batches(number: int) -> Any:
        generator = torch.Generator().manual_seed(run.settings.seed * 1_000_003 + number)
        return run.rows_in_order(rows.select(torch.randperm(len(rows), generator=generator)[:fresh].tolist()))

    return Rewards(draw_batches, score)


def metric_score(run: Setup) -> Score:
    """Return the task's first metric as a score."""
    as_class = run.kind.one_class_per_row

    def metric(labels: list[float], predictions: list[float]) -> float:
        records = [
            {"label": int(label) if as_class else label, "prediction": int(answer) if as_class else answer}
            for label, answer in zip(labels, predictions, strict=True)
        ]
        return run.kind.score(records)[run.task.metric]

    return MetricScore(metric)
