"""AttendOut with rounds of one step, which logs the drop rates of a planted word and of another word as frequent.

attnreg recipe docs/results/exploration/game.py --data-dir PLANTED --decisions type
"""

import click

import attnreg
from attnreg.experiments import option, recipe
from attnreg.training import AttackerDefender, Reinforce, Rounds


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
    from attnreg.experiments.runs.game import RewardRows, WatchedWord

    rows = RewardRows(run, "half-dev", 0, run.epochs)
    generator = attnreg.GNetProvider.for_model(run.model, initial_keep=0.8, decisions=decisions)
    players = AttackerDefender(
        run.model,
        generator,
        run.optimizer,
        credit=Reinforce(learning_rate=generator_lr, bias_learning_rate=bias_lr),
        rewards=rows.rewards(f"Rewards(batches_per_round={reward_batches})", 1),
        rounds=Rounds(steps=1),
        scheduler_factory=run.schedule,
        accelerator=run.accelerator,
    )
    watched, other = (WatchedWord(run, generator, each) for each in (word, placebo))

    def rates() -> dict[str, float]:
        of_other = {name.replace("watched", "placebo"): rate for name, rate in other().items() if "watched" in name}
        return {**watched(), **of_other}

    players.on_round = rates
    run.report(run.fit(players), notes=[rows.note])
