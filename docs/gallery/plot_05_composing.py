"""
Compose regularizers
====================

``a & b`` applies both masks: what either of them drops is dropped. ``OnLayers`` restricts a regularizer to some layers.
Three regularizers act together here; the bars show what each drops alone, and the line what all of them drop together.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import BertConfig, BertModel

import attnreg

torch.manual_seed(0)
model = BertModel(
    BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=6, num_attention_heads=4
    )
).train()
parts = {
    "AttentionDropout(0.1)": attnreg.AttentionDropout(0.1),
    "DropHead(0.2), layers 0 to 2": attnreg.OnLayers(
        attnreg.DropHead(0.2), [0, 1, 2]
    ),
    "AttentionLayerDrop(0.3), last layer": attnreg.OnLayers(
        attnreg.AttentionLayerDrop(0.3), [-1]
    ),
}


def mean_rates(provider):
    with attnreg.attach(model, provider) as handle:
        passes = []
        for _ in range(100):
            model(input_ids=torch.randint(1, 100, (8, 16)))
            rates = handle.drop_rates()
            passes.append([rates.get(f"encoder.{layer}", 0.0) for layer in range(6)])
    return np.mean(passes, axis=0)


# %%
# Independent drops do not add up: two rates a and b give 1 - (1 - a)(1 - b).
plt.figure(figsize=(7, 3.8), layout="constrained")
for place, (label, provider) in enumerate(parts.items()):
    plt.bar(
        np.arange(6) + 0.25 * (place - 1),
        mean_rates(provider),
        width=0.25,
        label=label,
    )
first, second, third = parts.values()
plt.plot(mean_rates(first & second & third), "ko-", label="a & b & c")
plt.xlabel("layer")
plt.ylabel("mean drop rate of 100 passes")
plt.ylim(0, 0.55)
plt.legend(ncols=2, fontsize=8)
plt.show()
