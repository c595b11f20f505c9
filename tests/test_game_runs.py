"""AttendOut on the command line: enough rounds, and rewards from every source."""

import math

import pytest

import attnreg
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.runs.game import plan_rounds
from attnreg.experiments.tasks import get_task
from tests.commands import ran, read_lines

GLUE = {"cola": 8551, "sst2": 67349, "mrpc": 3668, "qqp": 363846, "stsb": 5749, "mnli": 392702, "qnli": 104743,
        "rte": 2490, "wnli": 635}  # fmt: skip
SMALL = ["--epochs", 1, "--train-size", 96, "--no-baseline", "--warmup", 0, "--game", 1]


@pytest.mark.parametrize("name", GLUE)
def test_each_glue_task_has_thirty_rounds_by_default(name):
    task, rows = get_task(name), GLUE[name]
    usual = {parameter.name: parameter.default for parameter in load_command("attendout").params}
    held = min(usual["reward_rows"], rows // 10)
    with_held, whole = (math.ceil(n / task.batch_size) for n in (rows - held, rows))
    game_epochs = max(1, round(usual["game"] * task.epochs))
    total = game_epochs * with_held + (task.epochs - game_epochs) * whole
    _, rounds = plan_rounds(game_epochs * with_held - int(usual["warmup"] * total), usual["round_steps"])
    assert rounds >= 30


def test_a_game_of_few_rounds_says_so_before_it_starts(cli, tmp_path):
    result = ran(cli("recipe", "attendout", *SMALL, "--round-steps", 1, "--output-dir", "few"))
    sentence = "Warning: the game has only 2 rounds, too few for the Generator to learn: raise --game or --epochs"
    assert result.stderr.startswith(sentence)
    assert sentence in (tmp_path / "few" / "report.md").read_text()
    assert "The game had 2 rounds: the Attacker won" in result.stdout


def slow(*options):
    return pytest.param([*options], marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options",
    [
        slow("--reward-data", "half-dev"),
        ["--reward-data", "train", "--credit", "Reinforce(per='sample', baseline='leave-one-out')"],
        ["--reward-data", "dev", "--rewards", "Rewards(fresh_rows=1)"],
        ["--regime", "paper", "--generator", "none"],
        ["--rewards", "Rewards(score='metric')", "--reward-rows", 9],
        slow("--credit", "Reinforce(reward='sign')", "--generator", "GNetProvider(decisions='batch')"),
        slow("--generator", "GNetProvider() & DropHead(0.1)", "--rewards", "Rewards(fresh_rows=2)"),
        ["--provider", "TokenDropout(0.1) & AdversarialAttention(price=0.1)", "--provider-lr", 0.5],
        ["--task", "agreement-words"],  # pre-training
        slow("--generator", "none", "--winner", "evidence"),
    ],
    ids=lambda options: "".join(map(str, options[:2])),
)
def test_every_way_of_rewarding_runs(cli, tmp_path, options):
    ran(cli("recipe", "attendout", *SMALL, "--round-steps", 1, *options, "--output-dir", "out"))
    rounds = [line for line in read_lines(tmp_path / "out" / "telemetry.jsonl") if "winner" in line]
    assert len(rounds) == 2
    assert all(math.isfinite(line["reward"]) for line in rounds)
    if options[1] == "half-dev":
        assert "unseen_accuracy" in read_lines(tmp_path / "out" / "metrics.jsonl")[-1]
        assert "those of the other half" in (tmp_path / "out" / "report.md").read_text().lower()
    if "--provider" in options:
        saved = attnreg.Regularizer.from_pretrained(tmp_path / "out" / "provider")
        assert [type(each).__name__ for each in saved.providers] == [
            "GNetProvider", "TokenDropout", "AdversarialAttention"
        ]  # fmt: skip
        assert abs(float(saved.providers[2].bias.detach()[0]) - math.log(9)) > 0.1  # it has learned
    if "none" in options:
        assert not (tmp_path / "out" / "provider").exists()


@pytest.mark.parametrize("rewards", ["Rewards(score='metric')", "Rewards()"])
def test_negative_scores_do_not_end_a_run_of_proportional_winners(cli, tmp_path, rewards):
    options = ["--winner", "proportional", "--rewards", rewards, "--metric", "matthews_correlation"]
    ran(cli("recipe", "attendout", *SMALL, "--learning-rate", 3e-3, "--round-steps", 1, *options, "--output-dir", "o"))
    rounds = [line for line in read_lines(tmp_path / "o" / "telemetry.jsonl") if "winner" in line]
    assert "metric" in rewards or all(line["defender_score"] < 0 for line in rounds)  # minus the loss
    assert all(0 <= line["attacker_chance"] <= 1 for line in rounds)
