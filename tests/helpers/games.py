"""AttendOut's game on a tiny model."""

import dataclasses

import attnreg
from attnreg.training import AttackerDefender, Rewards, Rounds
from tests.helpers.method_cases import adamw, batches, bert


def make_batches(count, rows=4, seed=0):
    return list(batches(count, rows, seed))


def make_game(model=None, decisions="unit", **options):
    """A game; the arguments of its rounds and rewards are given among its own."""
    model = model or bert()
    generator = attnreg.GNetProvider.for_model(model, initial_keep=0.5, decisions=decisions)
    options.setdefault("batches", make_batches(2, seed=9))
    rounds, rewards = (
        record(**{field.name: options.pop(field.name) for field in dataclasses.fields(record) if field.name in options})
        for record in (Rounds, Rewards)
    )
    return AttackerDefender(model, generator, adamw, rounds=rounds, rewards=rewards, **options)
