"""AttendOut's game against a script written from Section 4 and Algorithm 1 of the paper alone; runs of its recipe."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import attnreg
from attnreg import attach
from attnreg.attendout.credit import Reinforce
from attnreg.attendout.gnet import GNetProvider
from attnreg.errors import InputError
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.runs.game import plan_rounds
from attnreg.experiments.tasks import get_task
from attnreg.training import AttackerDefender, Rewards, Rounds
from tests.helpers.commands import ran, read_lines

STEPS, ROWS, LENGTH, LAYERS, WIDTH, RATE = 3, 4, 5, 2, 8, 0.3


def make_model(dropout=0.0):
    sizes = {"vocab_size": 20, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 8}
    rates = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], dropout)
    # With such weights, the networks soon differ.
    config = hf.BertConfig(**sizes, **rates, initializer_range=0.5, attn_implementation="eager")
    return hf.BertForSequenceClassification(config).double()


def make_batch(rows=ROWS):
    return {"input_ids": torch.randint(1, 20, (rows, LENGTH)), "labels": torch.randint(0, 2, (rows,))}


def sgd(network):
    return torch.optim.SGD(network.parameters(), lr=RATE)


def scores_of(network, ids):
    """Section 4.1: one-head attention, one group of parameters for all layers, no feed-forward; its scores."""
    p = dict(network.named_parameters())

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"])

    x = norm(p["tokens.weight"][ids] + p["positions.weight"][: ids.shape[1]], "embedding_norm")
    scores = []
    for _ in range(LAYERS):
        query, key, value = F.linear(x, p["qkv.weight"], p["qkv.bias"]).chunk(3, -1)
        scores.append(query @ key.transpose(1, 2) / math.sqrt(WIDTH))
        x = norm(x + F.linear(scores[-1].softmax(-1) @ value, p["out.weight"], p["out.bias"]), "norm")
    return torch.stack(scores, 1)


def masked_logits(model, ids, keep):
    """BERT, with the scores of dropped units at -inf (Eq. 3; a row without any kept unit is uniform, Eq. 4)."""
    x = model.bert.embeddings(ids)
    for layer, mask in zip(model.bert.encoder.layer, keep.unbind(1), strict=True):
        own = layer.attention.self
        query, key, value = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (own.query, own.key, own.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH / 2)
        scores = scores.masked_fill(~mask[:, None], -math.inf)
        none = ~mask.any(-1)[:, None, :, None]
        weights = torch.where(none, 1 / LENGTH, scores.masked_fill(none, 0.0).softmax(-1))
        x = layer.attention.output((weights @ value).transpose(1, 2).flatten(2), x)
        x = layer.output(layer.intermediate(x), x)
    return model.classifier(model.dropout(model.bert.pooler(x)))


def descend(parameters, loss):
    parameters = list(parameters)
    with torch.no_grad():
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter -= RATE * gradient


@pytest.mark.parametrize("seed", range(3))
def test_a_round_equals_a_script_of_algorithm_1(seed):
    torch.manual_seed(seed)
    model, dev = make_model(), [make_batch(STEPS), make_batch(STEPS)]
    game = AttackerDefender.paper(
        model,
        lambda number: [dev[number]],
        sgd,
        steps=STEPS,
        score=lambda network, rows: network(**rows).logits.softmax(-1).gather(1, rows["labels"][:, None])[:, 0],
        generator_optimizer_factory=sgd,
        max_grad_norm=None,
    )
    game.generator.double()
    with torch.no_grad():  # far from equal scores
        game.generator.network.qkv.weight.normal_(std=1.0)
    # 1: initialize θ_D, θ_A, θ_G, where θ_D = θ_A
    attacker, defender = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    network = copy.deepcopy(game.generator.network)
    for number in range(2):
        batches, masks, logs = [make_batch() for _ in range(STEPS)], [], {}
        if number:  # 9: initialize θ_D, θ_A for the next step
            attacker, defender = copy.deepcopy(winner), copy.deepcopy(winner)  # noqa: F821
        for batch in batches:
            logs = game.step(batch)
            keep = game.generator.keep
            assert keep.shape == (ROWS, LAYERS, 1, LENGTH, LENGTH)  # l² units per layer, for all heads
            masks.append(keep[:, :, 0].clone())
            everything = torch.ones_like(masks[-1])
            # 3: update D; 4 and 5: update A under G's dropout
            for learner, mask in ((defender, everything), (attacker, masks[-1])):
                logits = masked_logits(learner, batch["input_ids"], mask)
                descend(learner.parameters(), F.cross_entropy(logits, batch["labels"]))
        # 7: evaluate D and A on T samples, and reward G
        rows = dev[number]
        a, d = (
            each(rows["input_ids"]).logits.softmax(-1).gather(1, rows["labels"][:, None])[:, 0].detach()
            for each in (attacker.eval(), defender.eval())
        )
        rewards = a - d
        baseline = baseline if number else rewards.mean()  # noqa: F821
        # 8: Eq. 5, a mean over samples and units; its sum over t is divided by T
        objective = 0.0
        for batch, keep, reward in zip(batches, masks, rewards, strict=True):
            p = torch.sigmoid(scores_of(network, batch["input_ids"]))
            log_prob = torch.where(keep, p, 1 - p).log().mean((1, 2, 3))
            objective = objective + (log_prob * (reward - baseline)).mean() / STEPS
        before = copy.deepcopy(network.state_dict())
        descend(network.parameters(), -objective)
        baseline = baseline + 0.1 * (rewards.mean() - baseline)
        for name, parameter in network.named_parameters():
            ours = dict(game.generator.network.named_parameters())[name]
            assert torch.allclose(ours, parameter, atol=1e-6, rtol=1e-6), name
        assert (network.qkv.weight - before["qkv.weight"]).abs().max() > 1e-5  # it has learned
        assert logs.logs["reward"] == pytest.approx(float(rewards.mean()), abs=1e-6)
        assert logs.logs["attacker_chance"] == pytest.approx(float(a.mean() / (a.mean() + d.mean())), abs=1e-6)
        winner = {"attacker": attacker, "defender": defender}[logs.events["winner"]].train()
        for theirs in (game.attacker.model, game.defender.model):
            for ours, parameter in zip(theirs.parameters(), winner.parameters(), strict=True):
                assert torch.allclose(ours, parameter, atol=1e-6)


def test_the_game_lasts_the_whole_training_and_leaves_the_models_own_dropout():
    game = AttackerDefender.paper(make_model(0.1), lambda number: [make_batch(2)], sgd, steps=2)
    assert (game.course.warmup_steps, game.course.game_steps, game.course.winner) == (0, None, "proportional")
    for network in (game.attacker.model, game.defender.model):
        assert {each.p for each in network.modules() if isinstance(each, torch.nn.Dropout)} == {0.1}
    assert "network.bias" not in dict(game.generator.named_parameters())


def test_keep_begins_near_one_half_without_a_bias_and_is_saved_so(tmp_path):
    model = make_model().float()
    generator = GNetProvider.for_model(model, initial_keep=None)
    handle = attach(model, generator)
    batch = make_batch()
    model(**batch)
    assert generator.keep_probability(batch).mean() == pytest.approx(0.5, abs=0.1)
    handle.detach()
    generator.save_pretrained(tmp_path)
    again = GNetProvider.from_pretrained(tmp_path)
    assert again.initial_keep is None
    assert torch.equal(again.logits(batch), generator.logits(batch))


def test_a_short_round_takes_the_first_rewards_and_too_few_rows_are_refused():
    model = make_model()
    game = AttackerDefender.paper(model, lambda number: [make_batch(2)], sgd, steps=3)
    game.generator.double()
    for _ in range(2):
        game.step(make_batch())
    with pytest.raises(ValueError, match="a reward row per step with `per` 'step', got 2 rows for 3 steps"):
        game.step(make_batch())
    generator, credit = GNetProvider.for_model(model, initial_keep=None).double(), Reinforce(reward="gap", per="step")
    parts = {"rewards": Rewards(lambda number: [make_batch(3)]), "rounds": Rounds(3, game_steps=5)}
    game = AttackerDefender(make_model(), generator, sgd, credit=credit, **parts)
    for _ in range(5):
        game.step(make_batch())
    assert game.rounds == 2


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


#: Scores of any sign: minus the loss, and a correlation.
BY_SIGN = ["--winner", "proportional", "--metric", "matthews_correlation", "--learning-rate", 3e-3]


def slow(*options):
    return pytest.param([*options], marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options",
    [
        slow("--reward-data", "half-dev"),
        ["--reward-data", "train", "--credit", "Reinforce(per='sample', baseline='leave-one-out')"],
        slow("--reward-data", "dev", "--rewards", "Rewards(fresh_rows=1)"),
        ["--regime", "paper", "--generator", "none"],
        slow("--rewards", "Rewards(score='metric')", "--reward-rows", 9),
        slow("--credit", "Reinforce(reward='gap')", "--generator", "GNetProvider(decisions='batch')"),
        slow("--generator", "GNetProvider() & DropHead(0.1)", "--rewards", "Rewards(fresh_rows=2)"),
        ["--provider", "TokenDropout(0.1) & AdversarialAttention(price=0.1)", "--provider-lr", 0.5],
        slow("--task", "agreement-words"),  # pre-training
        slow("--generator", "none", "--winner", "evidence"),
        slow("--rewards", "Rewards()", *BY_SIGN),
        ["--rewards", "Rewards(score='metric')", *BY_SIGN],
    ],
    ids=lambda options: " ".join(map(str, options[:3])),
)
def test_every_way_of_rewarding_runs(cli, tmp_path, options):
    ran(cli("recipe", "attendout", *SMALL, "--round-steps", 1, *options, "--output-dir", "out"))
    rounds = [line for line in read_lines(tmp_path / "out" / "telemetry.jsonl") if "winner" in line]
    assert len(rounds) == 2
    assert all(math.isfinite(line["reward"]) and 0 <= line["attacker_chance"] <= 1 for line in rounds)
    if options[1] == "half-dev":
        assert "unseen_accuracy" in read_lines(tmp_path / "out" / "metrics.jsonl")[-1]
        assert "those of the other half" in (tmp_path / "out" / "report.md").read_text().lower()
    if "--provider" in options:
        saved = attnreg.Regularizer.from_pretrained(tmp_path / "out" / "provider")
        names = [type(each).__name__ for each in saved.providers]
        assert names == ["GNetProvider", "TokenDropout", "AdversarialAttention"]
        assert abs(float(saved.providers[2].bias.detach()[0]) - math.log(9)) > 0.1  # it has learned
    if "none" in options:
        assert not (tmp_path / "out" / "provider").exists()


def test_the_rows_of_a_round_come_from_a_function():
    with pytest.raises(InputError, match="Expected `batches` to be a function of the number of a round, got"):
        AttackerDefender.paper(make_model(0.1), [make_batch(2)], sgd, steps=2)


def test_the_recipe_plays_the_papers_game(cli, tmp_path):
    rewards = ["--rewards", "Rewards(score='accuracy', fresh_rows='steps')", "--round-steps", 2]
    options = ["--regime", "paper", *rewards, "--epochs", 1, "--train-size", 48, "--batch-size", 16, "--no-baseline"]
    result = ran(cli("recipe", "attendout", *options, "--output-dir", "out"))
    assert "Warning: rewards came from the dev set" in result.stderr
    assert "Warning: rewards came from the dev set" in (tmp_path / "out" / "report.md").read_text()
    rounds = [line for line in read_lines(tmp_path / "out" / "telemetry.jsonl") if "winner" in line]
    assert len(rounds) == 2
    assert all(math.isfinite(line["reward"]) for line in rounds)
    config = (tmp_path / "out" / "config.json").read_text()
    assert "per='step'" in config
    assert "initial_keep=None" in config
