"""The last step of a fit: trainings on all rows, and the mean of their weights, which is the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim.swa_utils import AveragedModel

from attnreg.experiments.fit.choice import probability_best
from attnreg.experiments.fit.race import LOSING, Race
from attnreg.experiments.fit.tries import Bench, Try

MOST = 4  # trainings on all rows


def trained_on_all(race: Race, best: Try) -> tuple[nn.Module, list[Try]]:
    """Train the best try on all rows, and again while time is left; return the mean network, and what was trained.

    LP-FT and contrastive fine-tuning take turns, unless one of them loses: which is better depends on the model and
    the rows, and few folds hardly tell.
    """
    clock, began = race.clock, race.clock.spent
    ways = itertools.cycle([best, *_rival(race, best)])

    def trainings() -> Iterator[tuple[Try, int]]:
        done: list[Try] = []
        for number, way in enumerate(itertools.islice(ways, 1 if best.is_probe else MOST)):
            passes = sum(each.passes for each in done)
            if done and 1.2 * way.passes * (clock.spent - began) / passes > clock.left:
                return
            clock.tell(f"training {way} on all {len(race.rows)} rows" + ", again" * (way in done))
            done.append(way)
            yield way, race.seed + number

    return mean_of(race.bench, trainings(), np.arange(len(race.rows)), lambda: clock.tick("training on all rows"))


def _rival(race: Race, best: Try) -> list[Try]:
    """Return the best try of the other way, LP-FT or contrastive fine-tuning, unless it loses: one try, or none."""
    shares = {}
    for other in race.done:
        if not (best.ends_with_fit and other.ends_with_fit):
            continue
        if (other.contrasts, other.max_length) == (not best.contrasts, best.max_length):
            predictions, rows, _ = race.table([best, other])
            shares[other] = probability_best(race.answers, race.rows.labels[rows], predictions, seed=race.seed)[1]
    return [other for other, share in shares.items() if share == max(shares.values()) >= LOSING][:1]


def mean_of(
    bench: Bench, trainings: Iterable[tuple[Try, int]], rows: NDArray[np.int64], tick: Callable[[], None]
) -> tuple[nn.Module, list[Try]]:
    """Return the mean of networks that are trained on the same rows, by try and seed, and the tries: a uniform soup.

    The head of the mean is fitted as the first try ends.

    Reference:
        Model soups (Wortsman et al., ICML 2022, arXiv 2203.05482), Section 2.
    """
    mean: Any = None
    ways = []
    for candidate, seed in trainings:
        network = bench.trained(candidate, rows, seed, tick)
        mean = mean or AveragedModel(network, device=torch.device("cpu"))
        mean.update_parameters(network)
        ways.append(candidate)
        del network  # with the mean on the CPU, a device needs no more memory for the next than for the first
    network = mean.module.to(bench.device)
    if len(ways) > 1:
        bench.fit_at_end(ways[0], network, rows)
    return network.eval(), ways
