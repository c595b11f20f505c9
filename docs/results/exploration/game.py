"""AttendOut with rounds of one step, which logs the drop rates of a planted word and of another word as frequent.

attnreg recipe docs/results/exploration/game.py --data-dir PLANTED --decisions type
"""

from collections.abc import Callable
from typing import Any

import click
import torch

import attnreg
from attnreg.experiments import option, recipe
from attnreg.training import AttackerDefender, Reinforce, Rounds

WATCHED_ROWS = 64


def watched(run: attnreg.experiments.Run, generator: attnreg.GNetProvider, word: str) -> Callable[[], dict[str, float]]:
    """Return a function that gives the drop rates of a word's keys, and of all others, in dev rows with the word."""
    (token,) = run.tokenizer(f"a {word}", add_special_tokens=False)["input_ids"][1:]  # as within a sentence
    having = [n for n, ids in enumerate(run.dev_rows["input_ids"]) if token in ids]
    if not having:
        raise click.UsageError(f"No dev row contains the word {word!r}: choose another.")
    batches = run.rows_in_order(run.dev_rows.select(having[:WATCHED_ROWS]))

    @torch.no_grad()
    def rates() -> dict[str, float]:
        sums: dict[str, Any] = {"watched": 0.0, "others": 0.0}
        counts = dict.fromkeys(sums, 0)
        for batch in batches:
            dropped = 1 - generator.keep_probability(batch).mean(2)  # (B, L, N, N), mean over heads
            units, is_word = generator.units(batch), (batch["input_ids"] == token)[:, None]
            for name, chosen in (("watched", units & is_word), ("others", units & ~is_word)):
                sums[name] = sums[name] + (dropped * chosen[:, None]).sum((0, 2, 3)).double()
                counts[name] += int(chosen.sum())
        return {
            f"{name}.{layer}": float(rate) / max(1, counts[name])
            for name, total in sums.items()
            for layer, rate in enumerate(total)
        }

    return rates


@recipe(
    "game",
    option(
        "--decisions", type=click.Choice(["unit", "key", "type", "word"]), default="unit", help="What is drawn at once."
    ),
    option(
        "--generator-lr",
        type=click.FloatRange(min=0),
        default=None,
        help="Learning rate of the Generator (default: that of its width).",
    ),
    option("--bias-lr", type=click.FloatRange(min=0), default=3e-3, help="Learning rate of its biases."),
    option("--reward-batches", type=click.IntRange(min=1), default=2, help="Batches of reward rows per round."),
    option("--word", default="[UNK]", help="The planted word."),
    option("--placebo", default="again", help="The other word."),
)
def game(
    run: "attnreg.experiments.Run", decisions: str, generator_lr: float | None, bias_lr: float, reward_batches: int,
    word: str, placebo: str,
) -> None:  # fmt: skip
    """AttendOut with rounds of one step, and rewards from half of dev."""
    from attnreg.experiments.runs.game import choose_reward_rows, rewards_from

    rows, note = choose_reward_rows(run, "half-dev", 0, run.epochs)
    generator = attnreg.GNetProvider.for_model(run.model, initial_keep=0.8, decisions=decisions)
    players = AttackerDefender(
        run.model,
        generator,
        run.optimizer,
        credit=Reinforce(learning_rate=generator_lr, bias_learning_rate=bias_lr),
        rewards=rewards_from(run, rows, f"Rewards(batches_per_round={reward_batches})", 1),
        rounds=Rounds(steps=1),
        scheduler_factory=run.schedule,
        accelerator=run.accelerator,
    )
    planted, other = (watched(run, generator, each) for each in (word, placebo))

    def rates() -> dict[str, float]:
        of_other = {name.replace("watched", "placebo"): rate for name, rate in other().items() if "watched" in name}
        return {**planted(), **of_other}

    players.on_round = rates
    run.report(run.fit(players), notes=[note])
