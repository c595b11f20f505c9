"""
A Generator's drop rates, round by round
========================================

AttendOut's Generator is a small network that draws the masks of the Attacker. After each round of a few steps it
learns from a reward, the gap between Attacker and Defender. The picture shows how its drop rates move in a short game
on a toy task. They move by chance as well: this is no proof that it helps.
"""

import matplotlib.pyplot as plt
import torch
from transformers import BertConfig, BertForSequenceClassification

import attnreg
from attnreg.training import AttackerDefender, adamw

torch.manual_seed(0)
config = BertConfig(vocab_size=20, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
model = BertForSequenceClassification(config)


def batch():
    tokens = torch.randint(1, 20, (16, 8))
    return {"input_ids": tokens, "labels": (tokens[:, 0] > tokens[:, 1]).long()}


generator = attnreg.GNetProvider.for_model(model)
game = AttackerDefender(
    model, generator, lambda network: adamw(network, 1e-3), reward_batches=[batch()], steps_per_round=4
)

# %%
# Forty rounds of four steps; a round's rate is the mean of its steps.
rates = []
for _ in range(40):
    steps = []
    for _ in range(4):
        game.step(batch())
        steps.append(game.drop_rates())
    rates.append({name: float(torch.stack([step[name] for step in steps]).mean()) for name in steps[0]})

plt.figure(figsize=(7, 3.5), layout="constrained")
for name in rates[0]:
    plt.plot(range(1, len(rates) + 1), [rate[name] for rate in rates], label=name)
plt.axhline(0.1, color="grey", linestyle=":", label="initial rate")
plt.xlabel("round")
plt.ylabel("mean drop rate of the Attacker")
plt.legend()
plt.show()
