"""
AttendOut's game, round by round
================================

In each round, the Attacker trains under the Generator's masks and the Defender without; then both are scored, and the
better one is more likely to go on in both places. The Generator learns from the gap between their scores. The picture
shows a short game on a toy task: who won, and how the Generator's drop rates moved. They move by chance as well: this
is no proof that it helps.
"""

import matplotlib.pyplot as plt
import torch
from transformers import BertConfig, BertForSequenceClassification

import attnreg
from attnreg.training import AttackerDefender, Rewards, Rounds, adamw

torch.manual_seed(0)
config = BertConfig(
    vocab_size=20,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
)
model = BertForSequenceClassification(config)


def batch():
    tokens = torch.randint(1, 20, (16, 8))
    return {"input_ids": tokens, "labels": (tokens[:, 0] > tokens[:, 1]).long()}


generator = attnreg.GNetProvider.for_model(model)
game = AttackerDefender(
    model,
    generator,
    lambda network: adamw(network, 1e-3),
    rewards=Rewards([batch()]),
    rounds=Rounds(steps=4),
)

# %%
# Forty rounds of four steps. The last step of a round reports both scores (in ``logs``) and the winner (in
# ``events``); a round's drop rate is the mean of its steps.
scores, winners, rates = {"attacker": [], "defender": []}, [], []
for _ in range(40):
    steps = []
    for _ in range(4):
        result = game.step(batch())
        steps.append(game.drop_rates())
    for name, values in scores.items():
        values.append(float(result.logs[f"{name}_score"]))
    winners.append(result.events["winner"])
    rates.append(
        {
            name: float(torch.stack([step[name] for step in steps]).mean())
            for name in steps[0]
        }
    )

# %%
# Above: the gap between both scores in each round, which is the Generator's reward, and who won the round.
figure, axes = plt.subplots(2, 1, figsize=(7, 5), layout="constrained", sharex=True)
rounds = range(1, 41)
gaps = [
    attacker - defender for attacker, defender in zip(*scores.values(), strict=True)
]
for name, color in (("attacker", "tab:orange"), ("defender", "tab:blue")):
    won = [
        number
        for number, winner in zip(rounds, winners, strict=True)
        if winner == name
    ]
    axes[0].bar(
        won,
        [gaps[number - 1] for number in won],
        color=color,
        label=f"the {name} wins {len(won)} of 40",
    )
axes[0].set_ylabel("Attacker's lead")
axes[0].set_yscale("symlog", linthresh=0.01)
axes[0].legend()
for name in rates[0]:
    axes[1].plot(rounds, [rate[name] for rate in rates], label=name)
axes[1].axhline(0.1, color="grey", linestyle=":", label="initial rate")
axes[1].set(xlabel="round", ylabel="drop rate")
axes[1].legend(ncols=4, loc="upper left", bbox_to_anchor=(0, 1.2))
plt.show()
