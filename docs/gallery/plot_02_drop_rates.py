"""
Drop rates by layer
===================

``handle.drop_rates()`` measures what was dropped in the latest training pass, layer by layer. Here, a rate falls with
depth, and so do the measured rates. Padding never counts.
"""

import matplotlib.pyplot as plt
import torch
from transformers import BertConfig, BertModel

import attnreg

torch.manual_seed(0)
model = BertModel(
    BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=6, num_attention_heads=4
    )
).train()
provider = attnreg.Scheduled(attnreg.DropKey(), over="depth", p=[(0, 0.3), (1, 0)])
handle = attnreg.attach(model, provider)

rates = []
for _ in range(20):
    model(input_ids=torch.randint(1, 100, (8, 16)))
    rates.append(list(handle.drop_rates().values()))
rates = torch.tensor(rates)

# %%
# Each dot is one pass.
layers = torch.arange(6)
plt.figure(figsize=(7, 3.5), layout="constrained")
plt.plot(layers, 0.3 * (1 - layers / 5), "k--", label="asked for")
plt.plot(layers, rates.mean(0), "o-", label="mean of 20 passes")
plt.scatter(layers.expand(20, 6), rates, s=8, color="grey", alpha=0.5)
plt.xlabel("layer")
plt.ylabel("drop rate")
plt.legend()
plt.show()
