"""The plots of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attnreg.errors import InputError, UsageError, one_line
from attnreg.experiments.folder.reader import RunReader
from attnreg.experiments.results.plots.attention import plot_sample
from attnreg.experiments.results.plots.style import (
    COLORS,
    count_axis,
    moving_mean,
    picture,
    point_alone,
    sequence,
    styles,
)


def plot_run(folder: Path, layer: int = 0) -> tuple[list[Path], dict[str, str]]:
    """Draw every plot that a run has data for, with one layer's attention.

    Returns:
        the files in the run's ``plots``; for each plot that cannot be drawn, its file name and the reason.
    """
    run, plots = RunReader(folder), folder / "plots"
    if run.config and not run.telemetry:
        raise InputError(f"The run in {folder} has not trained yet: there are no lines in telemetry.jsonl.")
    runs = {run.config["recipe"]: run}
    if (folder / "baseline" / "config.json").is_file():
        runs["plain fine-tuning"] = RunReader(folder / "baseline")
    drawn: dict[str, tuple[object, Callable[..., None]]] = {  # with what there must be
        "drop_rates": (any(line["drop_rate"] for line in run.telemetry), partial(plot_drop_rates, run)),
        "convergence": (run.metrics, partial(plot_convergence, runs)),
        "game": (run.rounds, partial(plot_game, run)),
        "probe": (run.probe, partial(plot_probe, **(run.probe or {}))),
        "attention": (
            _has_attention(folder) and run.config.get("kind") != "image-classification",  # its tokens have no names
            partial(plot_sample, run, layer=layer),
        ),
    }
    reasons = {
        plots / f"{name}.png": _draw(plot, plots / f"{name}.png") for name, (data, plot) in drawn.items() if data
    }
    left_out = {path.name: reason for path, reason in reasons.items() if reason is not None}
    missing = None if (folder / "provider").is_dir() else "the run has no regularizer."
    if not drawn["drop_rates"][0]:
        left_out["drop_rates.png"] = missing or "nothing was dropped."
    if not _has_attention(folder):
        left_out["attention.png"] = missing or "it needs the run's provider and model (see `compare --keep-models`)."
    return [path for path, reason in reasons.items() if reason is None], left_out


def _draw(plot: Callable[..., None], path: Path) -> str | None:
    """Draw a plot; return the reason if it cannot be drawn."""
    try:
        plot(path=path)
    except UsageError:
        raise
    except InputError as error:
        return one_line(error)
    return None


def _has_attention(folder: Path) -> bool:
    """Whether the run has a saved model and provider, which the attention plot needs."""
    return (folder / "provider").is_dir() and (folder / "model").is_dir()


def plot_convergence(runs: dict[str, RunReader], path: Path) -> None:
    """Plot losses and scores of runs of one task in the same axes; ``runs`` are by their names in the legend."""
    first = next(iter(runs.values()))
    metric = next(
        iter(name for name in first.metrics[0] if name not in ("network", "epoch", "step", "loss")), "accuracy"
    )
    with picture(path, width=11.0, height=3.8, columns=3, grid="y") as (train, loss, score):
        lines = [(name, run, network) for name, run in runs.items() for network in _networks(run)]
        for (name, run, network), style in zip(lines, styles(), strict=False):
            label = name if len(_networks(run)) == 1 else f"{name}: {network}"
            look = {"color": style.color, "linestyle": style.line, "label": label}
            key = f"{network}_loss" if network != "model" else "loss"
            losses = [(line["step"], line[key]) for line in run.telemetry if key in line]
            means = moving_mean([value for _, value in losses], max(1, len(losses) // 25))
            train.plot([step for step, _ in losses], means, lw=1.5, marker=point_alone(means), **look)
            records = [record for record in run.metrics if record["network"] == network]
            steps = [record["step"] for record in records]
            loss.plot(steps, [record["loss"] for record in records], marker=style.marker, ms=4, lw=1.5, **look)
            score.plot(steps, [record[metric] for record in records], marker=style.marker, ms=4, lw=1.5, **look)
        train.set(xlabel="step", title="training loss")
        loss.set(xlabel="step", title=f"loss on {first.scored_on} rows")
        score.set(xlabel="step", title=f"{metric.replace('_', ' ')} on {first.scored_on} rows")
        score.legend(frameon=False, fontsize="small")
        count_axis(train, loss, score)


def _networks(run: RunReader) -> list[str]:
    return list(dict.fromkeys(record["network"] for record in run.metrics))


def plot_drop_rates(run: RunReader, path: Path, *, published: bool = False) -> None:
    """Plot the drop rate of each attention site; lines have gaps where the provider was not active."""
    sites = list(dict.fromkeys(site for line in run.telemetry for site in line["drop_rate"]))
    window = max(1, len(run.telemetry) // 40)
    with picture(path, width=8.0, published=published) as (axes,):
        for site, color, style in zip(sites, sequence(len(sites)), styles(), strict=False):
            for part in _active_parts(run, site):
                steps, rates = [line["step"] for line in part], [line["drop_rate"][site] for line in part]
                mean = moving_mean(rates, window)
                axes.plot(steps, mean, linestyle=style.line, marker=style.marker, color=color, ms=4, lw=1.6,
                          markevery=max(1, len(steps) // 8), label=site)  # fmt: skip
        axes.set(xlabel="step", ylabel="drop rate", title=f"Drop rate per layer: {run.title}")
        axes.set_ylim(0, max(1.05 * axes.get_ylim()[1], 0.01))
        count_axis(axes)
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(named.values(), named.keys(), frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _active_parts(run: RunReader, site: str) -> list[list[dict[str, Any]]]:
    """Split the telemetry into consecutive parts in which a site has a drop rate."""
    parts: list[list[dict[str, Any]]] = [[]]
    for line in run.telemetry:
        if site in line["drop_rate"]:
            parts[-1].append(line)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def plot_game(run: RunReader, path: Path) -> None:
    """Plot scores and winner of each round, the reward and its baseline, and the Attacker's probability of winning.

    If the run watched a word, a fourth panel shows how often its keys are dropped, and all other keys, by layer.
    """
    rounds = run.rounds
    number = list(range(1, len(rounds) + 1))
    attacker, defender = ([line[f"{name}_score"] for line in rounds] for name in ("attacker", "defender"))
    won = [line["winner"] == "attacker" for line in rounds]
    layers = sum(name.startswith("watched.") for name in rounds[0])
    panels = 4 if layers else 3
    alone = point_alone(rounds)
    with picture(path, width=9.0, height=7.0 * panels / 3, rows=panels) as (scores, rewards, wins, *watched):
        scores.plot(number, attacker, "-", marker=alone, color=COLORS[2], lw=1.6, label="Attacker (masked in training)")
        scores.plot(number, defender, "--", marker=alone, color=COLORS[1], lw=1.6, label="Defender")
        for name, marker, color, which in (("Attacker", "^", COLORS[2], True), ("Defender", "o", COLORS[1], False)):
            points = [(n, max(a, d)) for n, a, d, w in zip(number, attacker, defender, won, strict=True) if w is which]
            scores.plot(*(zip(*points, strict=True) if points else ((), ())), marker, color=color, ms=6, mfc="white",
                        label=f"won by the {name}: {len(points)}")  # fmt: skip
        scores.set(ylabel="score on reward data", title=f"The game: {run.title}")
        rewards.axhline(0, color="#999999", lw=0.8)
        rewards.vlines(number, 0, [line["reward"] for line in rounds], color=COLORS[3], lw=2.0, label="reward r")
        if "baseline" in rounds[0]:  # not in a game without masks
            baselines = [line["baseline"] for line in rounds]
            rewards.plot(number, baselines, "-", marker=alone, color=COLORS[0], lw=1.6, label="baseline b")
        rewards.set(ylabel="reward")
        window = max(1, len(rounds) // 8)
        wins.axhline(0.5, color="#999999", lw=0.8)
        wins.plot(number, [line["attacker_chance"] for line in rounds], ".", color=COLORS[4], label="win probability")
        wins.plot(number, moving_mean([float(w) for w in won], window), "-", marker=alone, color=COLORS[0], lw=1.6,
                  label=f"fraction won, last {window}")  # fmt: skip
        wins.set(ylabel="Attacker's wins", xlabel="round", ylim=(-0.05, 1.05))
        for axes in watched:
            for layer, color in enumerate(sequence(layers)):
                for name, whose, style in (("watched", "watched", "-"), ("others", "other", ":")):
                    rates = [line[f"{name}.{layer}"] for line in rounds]
                    label = f"layer {layer}, {whose} keys"
                    axes.plot(number, rates, style, marker=alone, color=color, lw=1.6, label=label)
            axes.set(ylabel="drop rate", xlabel="round", ylim=(0, 1))
        for axes in (scores, rewards, wins, *watched):
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        count_axis(scores, rewards, wins, *watched)


Point = tuple[float, float, float]


def plot_probe(lines: Mapping[str, Sequence[Point]], plain: float, score: str, path: Path) -> None:
    """Plot scores over the probability q of dropping a candidate, and over the share of attention that it drops.

    A point is q, share and score; ``plain`` is the score without dropping.
    """
    with picture(path, width=9.6, height=3.8, columns=2, grid="y") as both:
        for number, axes in enumerate(both):
            axes.axhline(plain, color=COLORS[0], lw=1.0, ls=":", label="nothing dropped")
            for (name, points), style in zip(lines.items(), itertools.islice(styles(), 1, None), strict=False):
                places, scores = [point[number] for point in points], [point[2] for point in points]
                axes.plot(places, scores, color=style.color, linestyle=style.line, marker=style.marker, ms=5, lw=1.6,
                          label=name)  # fmt: skip
        both[0].set(xlabel="probability q of dropping a candidate", ylabel=score.replace("_", " "))
        both[1].set(xlabel="share of attention dropped, mean over layers")
        both[1].sharey(both[0])
        both[1].legend(title="candidates", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
