"""AttendOut: a Generator learns dropout masks from a game of two models."""

from typing import Any

import click

import attnreg
from attnreg.experiments import argument, option, recipe

GAME, GENERATOR = "attnreg.training:AttackerDefender", "attnreg:GNetProvider.for_model"


@recipe(
    "attendout",
    option("--round-steps", type=click.IntRange(min=1), default=None,
           help="Steps per round, T in the paper (default: 8, or fewer for 30 rounds)."),
    option("--batches-per-round", type=click.IntRange(min=1), default=None,
           help="Reward batches that each round is scored on, in turn (default: half as many as steps)."),
    option("--score", type=click.Choice(["loss", "accuracy", "metric"]), default="loss",
           help='Score of a network: "loss" (negative), "accuracy" or "metric" (the task\'s, of all scored rows).'),
    *(argument(GAME, name) for name in ("reward", "reward_per", "winner", "reward_baseline", "antithetic", "credit",
                                        "price", "averaging", "returns")),
    option("--reward-data", type=click.Choice(["held-out", "dev", "half-dev", "train", "noisy-train"]),
           default="held-out",
           help='Rows for the reward: "held-out" (of train), "dev" or "half-dev" (bias dev scores), "train" (those of '
                'the round) or "noisy-train" (the same, with some tokens replaced).'),
    option("--reward-rows", type=click.IntRange(min=1), default=256,
           help="Held-out rows for the reward, at most a tenth of train."),
    option("--fresh-rows", type=click.IntRange(min=1),
           help="Score each round on this many reward rows, drawn anew (default: batches in turn)."),
    option("--reward-noise", type=click.FloatRange(0, 1), default=0.15,
           help="Share of tokens that noisy-train replaces."),
    option("--warmup", type=click.FloatRange(0, 1), default=0.1,
           help="Fraction of training, from its start, in which only the Defender trains; less than --game."),
    option("--game", type=click.FloatRange(0, 1, min_open=True), default=0.6,
           help="Fraction of epochs after which the game ends and only the returned network trains."),
    option("--generator-lr", type=click.FloatRange(min=0),
           help="Learning rate of the Generator (default: 1e-3, but less for a width above 64)."),
    option("--rate-lr", type=click.FloatRange(min=0), default=5e-2,
           help="Learning rate of the Generator's biases, which set the drop rate of each layer."),
    *(argument(GENERATOR, name) for name in ("initial_keep", "decisions")),
    option("--masks", type=click.Choice(["shared", "per-head", "none"]), default="per-head",
           help='"shared" (one mask for all heads of a layer), "per-head" (one for each) or "none" (selection alone).'),
    option("--generator-heads", type=click.Choice(["one", "per-head"]), default="one",
           help='"one" (all heads of a layer share probabilities) or "per-head" (probabilities for each head).'),
    argument(GENERATOR, "feed_forward"),
    argument(GENERATOR, "share_embeddings"),
    option("--watch", metavar="WORD", help="After each round, log how often this word's keys are dropped, and others."),
    option("--baseline/--no-baseline", default=True, help="Also run plain fine-tuning to compare."),
)  # fmt: skip
def attendout(
    run: "attnreg.experiments.Run", round_steps: int | None, batches_per_round: int | None, score: str,
    reward_data: Any, reward_rows: int, fresh_rows: int | None, reward_noise: float, warmup: float, game: float,
    generator_lr: float | None, rate_lr: float, initial_keep: float, decisions: Any, masks: str, generator_heads: str,
    feed_forward: bool, share_embeddings: bool, watch: str | None, baseline: bool, **choices: Any,
) -> None:  # fmt: skip
    """AttendOut: a Generator learns dropout masks from a game of two models.

    Example: attnreg recipe attendout --task cola --epochs 3
    """
    from attnreg.experiments.runs.rewards import choose_rewards, metric_score, plan_rounds, too_few
    from attnreg.experiments.runs.watch import WatchedWord

    if run.settings.gradient_accumulation > 1:
        raise click.UsageError("AttendOut's Generator masks whole batches: remove --gradient-accumulation.")
    if warmup >= game:
        raise click.UsageError(f"--warmup must be below --game, got {warmup} and {game}: the game would not begin.")
    if masks == "shared" and generator_heads == "per-head":
        raise click.UsageError("--generator-heads per-head draws one mask per head: use --masks per-head with it.")
    unused = {"--watch": watch, "--decisions": decisions != "unit", "--generator-heads": generator_heads != "one",
              "--feed-forward": feed_forward, "--share-embeddings": share_embeddings}  # fmt: skip
    if masks == "none" and (given := [flag for flag, used in unused.items() if used]):
        raise click.UsageError(f"{given[0]} needs a Generator: remove it for --masks none.")
    if reward_noise != 0.15 and reward_data != "noisy-train":
        raise click.UsageError("--reward-noise is for --reward-data noisy-train: remove it.")
    if score == "accuracy" and not run.kind.can_be_right:
        raise click.UsageError(f"Expected --score loss for the {run.task.kind} task {run.task.name}, got accuracy.")
    if fresh_rows and batches_per_round:
        raise click.UsageError("--fresh-rows are all scored in their round: remove --batches-per-round.")
    game_epochs = max(1, round(game * run.epochs))
    rewards = choose_rewards(run, reward_data, reward_rows, fresh_rows, reward_noise, game_epochs)
    warmup_steps, game_steps = int(warmup * run.total_steps), run.steps_in(game_epochs)
    steps = game_steps - warmup_steps
    round_steps, rounds = plan_rounds(steps, round_steps)
    notes = [note for note in (rewards.note, too_few(rounds)) if note is not None]
    for note in notes:
        click.echo(note, err=True)
    heads = getattr(run.model.config, "num_attention_heads", 1) if masks == "per-head" else 1
    generator = None if masks == "none" else attnreg.GNetProvider.for_model(
        run.model,
        initial_keep=initial_keep,
        decisions=decisions,
        masks_per_layer=heads if generator_heads == "one" else 1,
        num_heads=1 if generator_heads == "one" else heads,
        feed_forward=feed_forward,
        share_embeddings=share_embeddings,
    )  # fmt: skip
    players = attnreg.training.AttackerDefender(
        run.model,
        generator,
        run.optimizer,
        scheduler_factory=run.schedule,
        generator_optimizer_factory=lambda network: attnreg.training.generator_adam(network, generator_lr, rate_lr),
        reward_batches=rewards.batches,
        batches_per_round=None if fresh_rows else batches_per_round or max(1, round_steps // 2),
        reward_noise=rewards.noise,
        special_tokens=getattr(run.tokenizer, "all_special_ids", ()),
        score=metric_score(run) if score == "metric" else score,  # type: ignore[arg-type]
        steps_per_round=round_steps,
        warmup_steps=warmup_steps,
        game_steps=game_steps,
        on_round=None if generator is None or watch is None else WatchedWord(run, generator, watch),
        accelerator=run.accelerator,
        loss_function=run.loss_function,
        **choices,
    )
    history = run.fit(players)
    plain = None
    if baseline:
        other = run.plain()
        plain = other, other.train(attnreg.training.FineTuning)
    run.report(history, plain, notes)
