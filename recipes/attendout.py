from typing import Any

import click

import attnreg
from attnreg.experiments import expression_option, option, preset, provider_option, recipe

GAME = "attnreg.experiments.runs.game"
# What Section 4 and Algorithm 1 state; the score is our choice.
PAPER = {
    "generator": "GNetProvider(initial_keep=None)",
    "credit": "Reinforce(reward='gap', per='step')",
    "rewards": "Rewards(score='loss', fresh_rows='steps')",
    "reward_data": "dev",
    "winner": "proportional",
    "warmup": 0.0,
    "game": 1.0,
}


@recipe(
    "attendout",
    preset("--regime", {"paper": PAPER}, help='Other defaults: "paper" plays the game as the paper states it, with '
           "rewards from dev."),
    expression_option("--generator", f"{GAME}:read_generator", metavar="EXPRESSION|none",
                      help="Generator, or none for a game of selection alone "
                           "(default: GNetProvider(masks_per_layer='heads')); see docs/attendout.md."),
    provider_option(required=False, summary="Providers that act on the Attacker besides the Generator"),
    option("--initial-keep", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=None,
           help="Initial mean probability of keeping a position, of the default Generator (default: 0.9)."),
    expression_option("--credit", f"{GAME}:credit_of", metavar="EXPRESSION",
                      help="How the Generator learns: Reinforce(...), with its arguments (default: Reinforce())."),
    expression_option("--rewards", f"{GAME}:rewards_of", metavar="EXPRESSION",
                      help="Rewards(score, batches_per_round, fresh_rows): score 'loss', 'accuracy' or "
                           "'metric' (the task's, of all scored rows), batches per round (default: half as many as "
                           "steps), rows drawn anew per round, or 'steps' for as many as its steps (default: "
                           "batches in turn)."),
    option("--reward-data", type=click.Choice(["held-out", "dev", "half-dev", "train"]), default="held-out",
           help='Rows for the reward: "held-out" (of train), "dev" or "half-dev" (bias dev scores), or "train" (those '
                'of the round).'),
    option("--reward-rows", type=click.IntRange(min=1), default=256,
           help="Held-out rows for the reward, at most a tenth of train."),
    option("--round-steps", type=click.IntRange(min=1), default=None,
           help="Steps per round, T in the paper (default: 8, or fewer for 30 rounds)."),
    option("--winner", type=click.Choice(["evidence", "greedy", "proportional", "none"]), default="evidence",
           help="Winner of a round: each network with the probability that it is better (evidence), the better score "
                "(greedy), drawn in proportion to the scores, or none (no network is copied)."),
    option("--returns", type=click.Choice(["attacker", "defender"]), default="attacker",
           help="Network to keep after training."),
    option("--warmup", type=click.FloatRange(0, 1), default=0.1,
           help="Fraction of training, from its start, in which only the Defender trains; less than --game."),
    option("--game", type=click.FloatRange(0, 1, min_open=True), default=0.6,
           help="Fraction of epochs after which the game ends and only the returned network trains."),
    option("--baseline/--no-baseline", default=True, help="Also run plain fine-tuning to compare."),
    excludes=[
        ("gradient_accumulation", "has a Generator that masks whole batches"),
        ("initial_keep", "generator", "both set the rates at which the Generator begins"),
        ("generator=none", "provider", "exclude each other, because providers act beside a Generator"),
    ],
)  # fmt: skip
def attendout(
    run: "attnreg.experiments.Run", generator: str | None, provider: str | None, provider_lr: float,
    initial_keep: float | None, credit: str | None, rewards: str | None, reward_data: Any, reward_rows: int,
    round_steps: int | None, winner: Any, returns: Any, warmup: float, game: float, baseline: bool,
) -> None:  # fmt: skip
    """AttendOut: a Generator learns dropout masks from a game of two models.

    Example: attnreg recipe attendout --task cola --epochs 3
    """
    from attnreg.experiments.runs.game import choose_reward_rows, credit_of, plan_rounds, rewards_from, too_few

    if warmup >= game:
        raise click.UsageError(f"--warmup must be below --game, got {warmup} and {game}: the game would not begin.")
    generator = generator or f"GNetProvider(initial_keep={initial_keep or 0.9}, masks_per_layer='heads')"
    generator += "" if provider is None else f" & {provider}"
    game_epochs = max(1, round(game * run.epochs))
    rows, bias = choose_reward_rows(run, reward_data, reward_rows, game_epochs)
    warmup_steps, game_steps = int(warmup * run.total_steps), run.steps_in(game_epochs)
    round_steps, rounds = plan_rounds(game_steps - warmup_steps, round_steps)
    if generator == "none" and credit == PAPER["credit"]:
        credit = None  # of the regime; selection alone has nothing to learn
    notes = [note for note in (bias, too_few(rounds)) if note is not None]
    for note in notes:
        click.echo(note, err=True)
    players = attnreg.training.AttackerDefender(
        run.model,
        None if generator == "none" else run.make_provider(generator),
        run.optimizer,
        credit=None if credit is None else credit_of(credit),
        provider_lr=provider_lr,
        rewards=rewards_from(run, rows, rewards or "Rewards()", round_steps),
        rounds=attnreg.training.Rounds(round_steps, winner, warmup_steps, game_steps),
        returns=returns,
        scheduler_factory=run.schedule,
        accelerator=run.accelerator,
        **run.method_options,
    )
    history = run.fit(players)
    plain = None
    if baseline:
        plain_run = run.plain()
        plain = plain_run, plain_run.train(attnreg.training.FineTuning)
    run.report(history, plain, notes)
