"""Measure how noisy the Generator's updates are, for each way of teaching it.

If g is an update's gradient, ‖E g‖² / E‖g - E g‖² is its signal-to-noise ratio, and its inverse is about the number of
updates after which their mean points more to the signal than to noise. Two tables:

- With an oracle in place of the game, which rewards the share of a planted word's keys that was dropped.
- In the game: from one state (the built-in task with a planted word, sixteen steps of training), many single updates on
  random batches with random masks.

python docs/results/planted/variance.py --oracle 2000 --updates 100
"""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from planted import planted

import attnreg
from attnreg.attendout.credit import Teacher
from attnreg.experiments.tasks import choose_task, load_data
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.models.pretrained import load_model
from attnreg.training import AttackerDefender, Reinforce, Rewards, Rounds, adamw
from attnreg.training.method import Updater


def sgd(generator: torch.nn.Module) -> torch.optim.SGD:
    """Make an optimizer that leaves the Generator as it is until its learning rate is set."""
    return torch.optim.SGD(generator.parameters(), lr=0.0)


USUAL = Reinforce(reward="gap", optimizer_factory=sgd)
SAMPLE = replace(USUAL, per="sample")
KEY, BATCH = {"decisions": "key"}, {"decisions": "batch"}
# Name, options of the Generator, credit, steps per round, and whether the round's own rows are scored.
WAYS: list[tuple[str, dict[str, Any], Reinforce, int, bool]] = [
    ("one decision per unit (the paper's)", {}, USUAL, 1, False),
    ("... 8 steps per round", {}, USUAL, 8, False),
    ("... rewards from the round", {}, USUAL, 1, True),
    ("... rewards per sample of the round", {}, SAMPLE, 1, True),
    ("... and leave-one-out", {}, replace(SAMPLE, baseline="leave-one-out"), 1, True),
    ("one decision per key", KEY, USUAL, 1, False),
    ("... rewards per sample of the round", KEY, SAMPLE, 1, True),
    ("one decision per layer and batch", BATCH, USUAL, 1, False),
    ("one decision per head and batch", {**BATCH, "masks_per_layer": 6}, USUAL, 1, False),
]


ORACLE_WAYS: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    ("one decision per unit (the paper's)", {}, {}, 1),
    ("... 8 steps per round", {}, {}, 8),
    ("... rewards per sample", {}, {"per": "sample"}, 1),
    ("... and leave-one-out", {}, {"per": "sample", "baseline": "leave-one-out"}, 1),
    ("one decision per key", {"decisions": "key"}, {}, 1),
    ("... rewards per sample, leave-one-out", {"decisions": "key"}, {"per": "sample", "baseline": "leave-one-out"}, 1),
    ("one decision per layer and batch", {"decisions": "batch"}, {}, 1),
]
PLANTED = 3


class Ratio:
    """The signal-to-noise ratio of gradients that come one by one, without bias."""

    def __init__(self) -> None:
        self.total, self.squares, self.count = torch.zeros(()), 0.0, 0

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient."""
        self.total = self.total + gradient.double()
        self.squares += float(gradient.double().square().sum())
        self.count += 1

    def value(self) -> float:
        """Return the ratio."""
        noise = (self.squares - float(self.total.square().sum()) / self.count) / (self.count - 1)
        return (float((self.total / self.count).square().sum()) - noise / self.count) / noise

    def row(self, name: str) -> str:
        """Return a row of the table."""
        ratio = self.value()
        if ratio < 1 / self.count:
            return f"| {name} | below {1 / self.count:.4f} | more than {self.count} |"
        return f"| {name} | {ratio:.4f} | {1 / ratio:.1f} |"


def flat(module: torch.nn.Module) -> torch.Tensor:
    """Return all parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def oracle_ratio(generator_options: dict[str, Any], options: dict[str, Any], steps: int, updates: int) -> Ratio:
    """Return the ratio of single updates under the oracle's rewards."""
    torch.manual_seed(0)
    generator = attnreg.GNetProvider(30, 32, 3, 8, initial_keep=0.8, **generator_options)
    start, ratio = None, Ratio()
    teacher = Teacher(replace(USUAL, momentum=0.98, **options), generator, Updater(), max_grad_norm=None)
    for group in teacher.optimizer.param_groups:
        group["lr"] = 1.0
    for number in range(updates + 100):  # the first hundred settle the reward baseline
        rewards = []
        for _ in range(steps):
            ids = torch.randint(4, 30, (16, 8))
            ids[torch.arange(16), torch.randint(1, 8, (16,))] = PLANTED
            teacher.draw({"input_ids": ids, "labels": ids[:, 0]})
            assert generator.keep is not None
            rewards.append(1 - generator.keep.float().mean((1, 2, 3))[ids == PLANTED])
        start = flat(generator) if start is None else start
        teacher.update(torch.cat(rewards))
        if number >= 100:
            ratio.add(start - flat(generator))
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(start.clone(), generator.parameters())
    return ratio


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


def game_ratio(
    data: Data, generator_options: dict[str, Any], credit: Reinforce, steps: int, own_rows: bool, updates: int
) -> Ratio:
    """Return the ratio of single updates in the game."""
    torch.manual_seed(0)
    model = copy.deepcopy(data.model)
    generator = attnreg.GNetProvider.for_model(model, initial_keep=0.8, **generator_options)
    held_out = data.batch("validation", 256)
    game = AttackerDefender(
        model,
        generator,
        lambda network: adamw(network, 1e-3),
        credit=credit,
        rewards=Rewards(None if own_rows else [held_out]),
        rounds=Rounds(steps, winner="none"),
        max_grad_norm=None,
    )
    for _ in range(16):
        game.step(data.batch())
    for group in game._teacher.optimizer.param_groups:  # from here on, an update is the gradient itself
        group["lr"] = 1.0
    before, ratio = flat(generator), Ratio()
    for _ in range(updates):
        played = copy.deepcopy(game)
        for _ in range(steps):
            played.step(data.batch())
        ratio.add(before - flat(played.generator))
    return ratio


HEADER = "| way | signal to noise of an update | updates until signal equals noise |\n| --- | ---: | ---: |"


@click.command()
@click.option("--oracle", type=click.IntRange(min=2), default=2000, show_default=True, help="Updates by the oracle.")
@click.option("--updates", type=click.IntRange(min=2), default=100, show_default=True, help="Updates in the game.")
@click.option("--only", help="Only the ways of the game whose number is in this list, such as 0,6.")
@click.option("--smallest", is_flag=True, help="Two updates and three ways of the game, to test the script.")
def main(oracle: int, updates: int, only: str | None, smallest: bool) -> None:
    """Print both tables."""
    if smallest:
        oracle, updates, only = 2, 2, "1,4,8"
    click.echo(HEADER)
    for name, generator_options, options, steps in ORACLE_WAYS:
        click.echo(oracle_ratio(generator_options, options, steps, oracle).row(name))
    data = Data()
    click.echo(f"\n{HEADER}")
    for number in range(len(WAYS)) if only is None else [int(number) for number in only.split(",")]:
        name, generator_options, credit, steps, own_rows = WAYS[number]
        click.echo(game_ratio(data, generator_options, credit, steps, own_rows, updates).row(name))


if __name__ == "__main__":
    main()
