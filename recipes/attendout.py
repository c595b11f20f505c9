"""AttendOut: a Generator learns dropout masks from a game of two models."""

from typing import Any

import click

import attnreg
from attnreg.experiments import argument, option, recipe

GAME, GENERATOR = "attnreg.training:AttackerDefender", "attnreg:GNetProvider.for_model"


@recipe(
    "attendout",
    argument(GAME, "steps_per_round", "--round-steps"),
    *(argument(GAME, name) for name in ("score", "reward", "winner", "returns")),
    option("--reward-data", type=click.Choice(["held-out", "dev", "train"]), default="held-out",
           help='Rows for the reward: "held-out" (of train), "dev" (biases dev scores) or "train" (the round).'),
    option("--reward-rows", type=click.IntRange(min=1), default=256,
           help="Held-out rows for the reward, at most a tenth of train."),
    option("--warmup", type=click.FloatRange(0, 1), default=0.1,
           help="Fraction of training, from its start, in which only the Defender trains; less than --game."),
    option("--game", type=click.FloatRange(0, 1, min_open=True), default=0.3,
           help="Fraction of epochs after which the game ends and only the returned network trains."),
    option("--generator-lr", type=click.FloatRange(min=0), default=5e-5, help="Learning rate of the Generator."),
    argument(GENERATOR, "initial_keep"),
    option("--masks", type=click.Choice(["shared", "per-head"]), default="per-head",
           help='"shared" (one mask for all heads of a layer) or "per-head" (one mask for each head).'),
    option("--generator-heads", type=click.Choice(["one", "per-head"]), default="one",
           help='"one" (all heads of a layer share probabilities) or "per-head" (probabilities for each head).'),
    argument(GENERATOR, "feed_forward"),
    argument(GENERATOR, "share_embeddings"),
    option("--baseline/--no-baseline", default=True, help="Also run plain fine-tuning to compare."),
)  # fmt: skip
def attendout(
    run: "attnreg.experiments.Run", reward_data: str, reward_rows: int, warmup: float, game: float,
    generator_lr: float, initial_keep: float, masks: str, generator_heads: str, feed_forward: bool,
    share_embeddings: bool, baseline: bool, **choices: Any,
) -> None:  # fmt: skip
    """AttendOut: a Generator learns dropout masks from a game of two models.

    Example: attnreg recipe attendout --task cola --epochs 3
    """
    import torch

    if warmup >= game:
        raise click.UsageError(f"--warmup must be below --game, got {warmup} and {game}: the game would not begin.")
    if masks == "shared" and generator_heads == "per-head":
        raise click.UsageError("--generator-heads per-head draws one mask per head: use --masks per-head with it.")
    if choices["score"] == "accuracy" and not run.kind.can_be_right:
        raise click.UsageError(f"Expected --score loss for the {run.task.kind} task {run.task.name}, got accuracy.")
    game_epochs = max(1, round(game * run.epochs))
    reward_batches, notes = None, []
    if reward_data == "held-out":
        reward_batches = run.hold_out(min(reward_rows, max(1, len(run.train_rows) // 10)), epochs=game_epochs)
    elif reward_data == "dev":
        reward_batches = run.dev_batches
        notes.append("Warning: rewards came from the dev set (--reward-data dev), so the dev scores are not held out.")
        click.echo(notes[0], err=True)
    heads = getattr(run.model.config, "num_attention_heads", 1) if masks == "per-head" else 1
    generator = attnreg.GNetProvider.for_model(
        run.model,
        initial_keep=initial_keep,
        masks_per_layer=heads if generator_heads == "one" else 1,
        num_heads=1 if generator_heads == "one" else heads,
        feed_forward=feed_forward,
        share_embeddings=share_embeddings,
    )
    players = attnreg.training.AttackerDefender(
        run.model,
        generator,
        run.optimizer,
        scheduler_factory=run.schedule,
        generator_optimizer_factory=lambda network: torch.optim.Adam(network.parameters(), lr=generator_lr),
        reward_batches=reward_batches,
        warmup_steps=int(warmup * run.total_steps),
        game_steps=run.steps_in(game_epochs),
        accelerator=run.accelerator,
        **choices,
    )
    history = run.fit(players)
    plain = None
    if baseline:
        other = run.plain()
        plain = other, other.train(attnreg.training.FineTuning)
    run.report(history, plain, notes)
