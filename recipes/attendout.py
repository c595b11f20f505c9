"""AttendOut: a Generator learns attention-dropout masks from the game of an Attacker with a Defender."""

from typing import Literal

import click

import attnreg
from attnreg.training import recipe


@recipe(
    "attendout",
    click.option("--round-steps", type=click.IntRange(min=1), default=8, show_default=True, help="T."),
    click.option("--initial-keep", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.9,
                 show_default=True, help="The Generator's rate of keeping before it has learned."),
    click.option("--masks", type=click.Choice(["shared", "per-head"]), default="per-head", show_default=True,
                 help="One draw for all heads of a layer, or one for each from the same probabilities."),
    click.option("--generator-heads", type=click.Choice(["one", "per-head"]), default="one", show_default=True,
                 help="Heads of the Generator: one for all heads of a layer, or one for each."),
    click.option("--feed-forward", is_flag=True, help="Give the Generator a feed-forward block, shared by its layers."),
    click.option("--share-embeddings", is_flag=True, help="Let the Generator read the Attacker's embeddings."),
    click.option("--warmup", type=click.FloatRange(0, 1), default=0.1, show_default=True,
                 help="Share of training before the game begins."),
    click.option("--game", type=click.FloatRange(0, 1, min_open=True), default=0.3, show_default=True,
                 help="Share of the epochs in which it is played; then the returned one goes on alone, with all rows."),
    click.option("--generator-lr", type=click.FloatRange(min=0), default=5e-5, show_default=True),
    click.option("--score", type=click.Choice(["loss", "accuracy"]), default="loss", show_default=True),
    click.option("--reward", type=click.Choice(["gap", "sign", "standardized"]), default="standardized",
                 show_default=True),
    click.option("--winner", type=click.Choice(["evidence", "greedy", "proportional"]), default="evidence",
                 show_default=True, help="How the winner of a round is drawn."),
    click.option("--reward-data", type=click.Choice(["held-out", "dev", "train"]), default="held-out",
                 show_default=True, help="What the networks are scored on after each round."),
    click.option("--reward-rows", type=click.IntRange(min=1), default=256, show_default=True,
                 help="Rows held out from train for the reward, at most a tenth of it."),
    click.option("--returns", type=click.Choice(["attacker", "defender"]), default="attacker", show_default=True),
    click.option("--baseline/--no-baseline", default=True, show_default=True, help="Also run plain fine-tuning."),
)  # fmt: skip
def attendout(
    run: "attnreg.training.Run",
    round_steps: int,
    initial_keep: float,
    masks: str,
    generator_heads: str,
    feed_forward: bool,
    share_embeddings: bool,
    warmup: float,
    game: float,
    generator_lr: float,
    score: str,
    reward: str,
    winner: str,
    reward_data: str,
    reward_rows: int,
    returns: Literal["attacker", "defender"],
    baseline: bool,
) -> None:
    """AttendOut: a Generator learns attention-dropout masks from the game of an Attacker with a Defender.

    Example: attnreg recipe attendout --task cola --epochs 3
    """
    import torch

    if warmup >= game:
        raise click.UsageError(f"Expected --warmup below --game, got {warmup} and {game}: the game would not begin.")
    if masks == "shared" and generator_heads == "per-head":
        raise click.UsageError(
            "Expected --masks per-head with --generator-heads per-head, got shared: each head then has its own draw."
        )
    if score == "accuracy" and not run.kind.can_be_right:
        raise click.UsageError(f"Expected --score loss for the {run.task.kind} task {run.task.name}, got accuracy.")
    reward_batches, notes = None, []
    game_epochs = max(1, round(game * run.epochs))
    if reward_data == "held-out":
        rows = min(reward_rows, max(1, len(run.train_rows) // 10))
        reward_batches = run.hold_out(rows, epochs=game_epochs)
    elif reward_data == "dev":
        reward_batches = run.dev_batches
        notes.append("Warning: rewards came from the dev set (--reward-data dev), so the dev scores are not held out.")
        click.echo(notes[0], err=True)

    warmup_steps, game_steps = int(warmup * run.total_steps), run.steps_in(game_epochs)
    if game_steps - warmup_steps < round_steps:
        raise click.UsageError(
            f"No round of --round-steps {round_steps} fits into the game, {game_steps - warmup_steps} steps, so the "
            "Generator would not learn: lower --round-steps, or raise --game or --epochs."
        )
    heads = getattr(run.model.config, "num_attention_heads", 1) if masks == "per-head" else 1
    one = generator_heads == "one"
    generator = attnreg.GNetProvider.for_model(
        run.model,
        initial_keep=initial_keep,
        masks_per_layer=heads if one else 1,
        num_heads=1 if one else heads,
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
        steps_per_round=round_steps,
        warmup_steps=warmup_steps,
        game_steps=game_steps,
        score=score,
        reward=reward,
        winner=winner,
        returns=returns,
        accelerator=run.accelerator,
    )
    history = attnreg.training.fit(players, run)

    plain = None
    if baseline:
        plain_run = run.plain()
        optimizer = plain_run.optimizer(plain_run.model)
        method = attnreg.training.FineTuning(
            plain_run.model, optimizer, scheduler=plain_run.schedule(optimizer), accelerator=plain_run.accelerator
        )
        plain = plain_run, attnreg.training.fit(method, plain_run)
    attnreg.training.report(run, history, plain, notes)
