"""Measure how noisy the Generator's updates are, for each way of teaching it.

From one state of the game (the built-in task with a planted word, sixteen steps of training), many single updates are
made on random batches with random masks. If g is an update's gradient, ‖E g‖² / E‖g - E g‖² is its signal-to-noise
ratio, and its inverse is about the number of updates after which their mean points more to the signal than to noise.

python benchmarks/variance.py --updates 200
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from planted import planted

import attnreg
from attnreg.experiments.tasks import choose_task, load_data
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.model import load_model
from attnreg.training import AttackerDefender, adamw

TRAIN = {"reward_batches": None}
SAMPLE = {**TRAIN, "reward_per": "sample"}
WAYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("one decision per unit (the paper's)", {}, {}),
    ("... 8 steps per round", {}, {"steps_per_round": 8}),
    ("... rewards from the round", {}, TRAIN),
    ("... rewards per sample of the round", {}, SAMPLE),
    ("... and leave-one-out", {}, {**SAMPLE, "reward_baseline": "leave-one-out"}),
    ("... antithetic", {}, {"antithetic": True}),
    ("one decision per key", {"decisions": "key"}, {}),
    ("... rewards per sample of the round", {"decisions": "key"}, SAMPLE),
    ("... antithetic", {"decisions": "key"}, {"antithetic": True}),
    ("one decision per layer and batch", {"decisions": "batch"}, {}),
    ("... antithetic", {"decisions": "batch"}, {"antithetic": True}),
    ("one decision per head and batch", {"decisions": "batch", "masks_per_layer": 6}, {}),
    ("credit by gradient, per unit", {}, {"credit": "gradient"}),
    ("credit by gradient, per key", {"decisions": "key"}, {"credit": "gradient"}),
]


class Data:
    """Random batches of the built-in task with a planted word."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            planted(["--share", "0.7", "--output-dir", folder], standalone_mode=False)
            task, splits = load_data(choose_task("agreement"), Path(folder))
        self.model, tokenizer = load_model(task, None)
        self.kind = kind_class(task.kind)(task, tokenizer, 32)
        self.rows = {
            name: self.kind.encode(splits[name]).remove_columns("reference") for name in ("train", "validation")
        }

    def batch(self, split: str = "train", size: int = 64) -> dict[str, torch.Tensor]:
        """Draw rows of a split."""
        rows = self.rows[split]
        chosen = rows[torch.randint(len(rows), (size,)).tolist()]
        return self.kind.collate([{name: column[i] for name, column in chosen.items()} for i in range(size)])


def signal_to_noise(data: Data, generator_options: dict[str, Any], game_options: dict[str, Any], updates: int) -> float:
    """Return the signal-to-noise ratio of single updates."""
    torch.manual_seed(0)
    model = copy.deepcopy(data.model)
    generator = attnreg.GNetProvider.for_model(model, initial_keep=0.8, **generator_options)
    game = AttackerDefender(
        model,
        generator,
        lambda network: adamw(network, 1e-3),
        **{
            "reward_batches": [data.batch("validation", 256)],
            "steps_per_round": 1,
            "winner": "none",
            "reward": "gap",
            "price": 0.0,
            "max_grad_norm": None,
            "generator_optimizer_factory": lambda network: torch.optim.SGD(network.parameters(), lr=0.0),
            **game_options,
        },
    )
    steps = game.steps_per_round
    for _ in range(16):
        game.step(data.batch())
    for group in game._teacher.optimizer.param_groups:  # from here on, an update is the gradient itself
        group["lr"] = 1.0
    before = torch.cat([p.detach().flatten() for p in generator.parameters()])
    total = torch.zeros_like(before, dtype=torch.float64)
    squares = 0.0
    for _ in range(updates):
        played = copy.deepcopy(game)
        for _ in range(steps):
            played.step(data.batch())
        gradient = (before - torch.cat([p.detach().flatten() for p in played.generator.parameters()])).double()
        total += gradient
        squares += float(gradient.square().sum())
    noise = (squares - float(total.square().sum()) / updates) / (updates - 1)
    return (float((total / updates).square().sum()) - noise / updates) / noise


@click.command()
@click.option("--updates", type=click.IntRange(min=2), default=200, show_default=True, help="Updates per way.")
@click.option("--only", help="Only the ways whose number is in this list, such as 0,6.")
def main(updates: int, only: str | None) -> None:
    """Print the table."""
    data = Data()
    numbers = range(len(WAYS)) if only is None else [int(number) for number in only.split(",")]
    click.echo("| way | signal to noise of an update | updates until signal equals noise |\n| --- | ---: | ---: |")
    for number in numbers:
        name, generator_options, game_options = WAYS[number]
        ratio = signal_to_noise(data, generator_options, game_options, updates)
        needed = f"{1 / ratio:.0f}" if ratio > 1 / updates else f"more than {updates}"
        click.echo(f"| {name} | {ratio:.4f} | {needed} |")


if __name__ == "__main__":
    main()
