"""The plots of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib import colormaps

from attnreg.errors import InputError, UsageError, one_line
from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.options.settings import scored_rows
from attnreg.experiments.results.plots.attention import plot_sample
from attnreg.experiments.results.plots.style import (
    COLORS,
    count_axis,
    legend_beside,
    moving_mean,
    picture,
    point_alone,
    styles,
)

CAPTIONS = {
    "drop_rates": "Drop rate per layer over steps.",
    "convergence": "Training loss, and loss and score on the scored rows, over steps.",
    "game": "Scores and winners of rounds, rewards, and the Attacker's chance to win.",
    "attention": "Attention of one sample in layer 0, and what the regularizer drops.",
}


def plot_run(folder: Path, layer: int = 0) -> tuple[list[Path], dict[str, str]]:
    """Draw every plot that a run has data for, with one layer's attention.

    Returns:
        the files in the run's ``plots``; for plots that cannot be drawn, the reasons by file name.
    """
    run = RunReader(folder)
    if run.config and not run.telemetry:
        raise InputError(f"The run in {folder} has not trained yet: there are no lines in telemetry.jsonl.")
    runs = {run.config["recipe"]: run}
    if (folder / "baseline" / "config.json").is_file():
        runs["plain fine-tuning"] = RunReader(folder / "baseline")
    has_rates = any(line["drop_rate"] for line in run.telemetry)
    has_attention = (folder / "provider").is_dir() and (folder / "model").is_dir()
    has_names = run.config.get("kind") != "image-classification"  # of tokens
    needed = {"drop_rates": "nothing was dropped.", "attention": "it needs the run's provider, model and tokens."}
    plots: dict[str, tuple[object, Callable[..., None]]] = {  # with the data that a plot needs
        "drop_rates": (has_rates, partial(plot_drop_rates, run)),
        "convergence": (run.metrics, partial(plot_convergence, runs)),
        "game": (run.rounds, partial(plot_game, run)),
        "attention": (has_attention and has_names, partial(plot_sample, run, layer=layer)),
    }
    paths, left_out = list[Path](), dict[str, str]()
    for name, (data, plot) in plots.items():
        path = folder / "plots" / f"{name}.png"
        try:
            if data:
                plot(path=path)
                paths.append(path)
            elif name in needed:
                left_out[path.name] = needed[name]
        except UsageError:  # of the option --layer
            raise
        except InputError as error:
            left_out[path.name] = one_line(error)
    return paths, left_out


def plot_convergence(runs: dict[str, RunReader], path: Path) -> None:
    """Plot losses and scores of runs of one task in the same axes; ``runs`` are by their names in the legend."""
    first_run = next(iter(runs.values()))
    no_metrics = ("network", "epoch", "step", "loss")
    metric = next((name for name in first_run.metrics[0] if name not in no_metrics), "accuracy")
    with picture(path, width=11.0, height=3.8, columns=3, grid="y") as (train, loss, score):
        lines = [(name, run, network) for name, run in runs.items() for network in _networks(run)]
        for (name, run, network), style in zip(lines, styles(), strict=False):
            label = name if len(_networks(run)) == 1 else f"{name}: {network}"
            line_style = {**style._asdict(), "ms": 4, "label": label}
            key = f"{network}_loss" if network != "model" else "loss"
            losses = [(line["step"], line[key]) for line in run.telemetry if key in line]
            means = moving_mean([value for _, value in losses], max(1, len(losses) // 25))
            train.plot([step for step, _ in losses], means, **{**line_style, "marker": point_alone(means)})
            records = [record for record in run.metrics if record["network"] == network]
            for axes, key in ((loss, "loss"), (score, metric)):
                scores = [record[key] for record in records]
                axes.plot([record["step"] for record in records], scores, **line_style)
        train.set(xlabel="step", title="training loss")
        rows = scored_rows(first_run.config)
        loss.set(xlabel="step", title=f"loss on {rows} rows")
        score.set(xlabel="step", title=f"{metric.replace('_', ' ')} on {rows} rows")
        score.legend(fontsize="small")
        count_axis(train, loss, score)


def _networks(run: RunReader) -> list[str]:
    return list(dict.fromkeys(record["network"] for record in run.metrics))


def plot_drop_rates(run: RunReader, path: Path, *, published: bool = False) -> None:
    """Plot the drop rates of attention sites; lines have gaps where the provider was not active."""
    sites = list(dict.fromkeys(site for line in run.telemetry for site in line["drop_rate"]))
    window = max(1, len(run.telemetry) // 40)
    with picture(path, width=8.0, published=published) as (axes,):
        for number, (site, style) in enumerate(zip(sites, styles(), strict=False)):
            color = colormaps["viridis"](0.9 * number / max(1, len(sites) - 1))  # from dark to light
            points = [(line["step"], line["drop_rate"].get(site)) for line in run.telemetry]
            for is_gap, part in itertools.groupby(points, lambda point: point[1] is None):
                if not is_gap:
                    steps, rates = zip(*part, strict=True)
                    line_style = {**style._asdict(), "color": color, "markevery": max(1, len(steps) // 8)}
                    axes.plot(steps, moving_mean(list(rates), window), **line_style, ms=4, label=site)
        axes.set(xlabel="step", ylabel="drop rate", title=f"Drop rate per layer: {run.title}")
        axes.set_ylim(0, max(1.05 * axes.get_ylim()[1], 0.01))
        count_axis(axes)
        legend_beside(axes)


def plot_game(run: RunReader, path: Path) -> None:
    """Plot scores and winners of rounds, the reward and its baseline, and the Attacker's probability of winning."""
    rounds = run.rounds
    numbers = list(range(1, len(rounds) + 1))
    dot = point_alone(rounds)
    with picture(path, width=9.0, height=7.0, rows=3) as (scores, rewards, wins):
        for name, dash, marker, color, note in (
            ("Attacker", "-", "^", COLORS[2], " (masked in training)"),
            ("Defender", "--", "o", COLORS[1], ""),
        ):
            line_scores = [line[f"{name.lower()}_score"] for line in rounds]
            scores.plot(numbers, line_scores, dash, marker=dot, color=color, label=f"{name}{note}")
            won = {number: line for number, line in zip(numbers, rounds, strict=True) if line["winner"] == name.lower()}
            best = [max(line["attacker_score"], line["defender_score"]) for line in won.values()]
            scores.plot([*won], best, marker, color=color, ms=6, mfc="white",
                        label=f"won by the {name}: {len(won)}")  # fmt: skip
        scores.set(ylabel="score on reward data", title=f"The game: {run.title}")
        rewards.axhline(0, color="#999999", lw=0.8)
        rewards.vlines(numbers, 0, [line["reward"] for line in rounds], color=COLORS[3], lw=2.0, label="reward r")
        if "baseline" in rounds[0]:  # not in a game without masks
            baselines = [line["baseline"] for line in rounds]
            rewards.plot(numbers, baselines, "-", marker=dot, color=COLORS[0], label="baseline b")
        rewards.set(ylabel="reward")
        window, wins_of_attacker = max(1, len(rounds) // 8), [float(line["winner"] == "attacker") for line in rounds]
        wins.axhline(0.5, color="#999999", lw=0.8)
        wins.plot(numbers, [line["attacker_chance"] for line in rounds], ".", color=COLORS[4], label="win probability")
        wins.plot(numbers, moving_mean(wins_of_attacker, window), "-", marker=dot, color=COLORS[0],
                  label=f"fraction won, last {window}")  # fmt: skip
        wins.set(ylabel="Attacker's wins", xlabel="round", ylim=(-0.05, 1.05))
        legend_beside(scores, rewards, wins)
        count_axis(scores, rewards, wins)
