"""Plot AttendOut's game over its rounds."""

from __future__ import annotations

from pathlib import Path

from attnreg.experiments.folder.reader import RunReader
from attnreg.experiments.results.plots.style import COLORS, count_axis, moving_mean, picture, point_alone, sequence


def plot_game(run: RunReader, path: Path) -> bool:
    """Plot scores and winner of each round, the reward and its baseline, and the Attacker's probability of winning.

    If the run watched a word, a fourth panel shows how often its keys are dropped, and all other keys, by layer.

    Returns:
        whether a round was finished; otherwise no file is written.
    """
    rounds = run.rounds
    if not rounds:
        return False
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
    return True
