"""
Replay the masks of a pass
==========================

All masks of a pass follow from one seed, ``handle.seed``. ``handle.replay(seed)`` applies the same masks again, also
in eval mode and without gradients. A new pass draws others.
"""

import matplotlib.pyplot as plt
import torch
from transformers import BertConfig, BertModel

import attnreg

torch.manual_seed(0)
config = BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout_prob=0
)
config.attention_probs_dropout_prob = 0
model = BertModel(config).train()
handle = attnreg.attach(model, attnreg.AttentionDropout(0.3, placement="scores"))
tokens = torch.randint(1, 100, (8, 16))

first = model(input_ids=tokens).last_hidden_state.detach()
seed = handle.seed
another = model(input_ids=tokens).last_hidden_state.detach()
model.eval()
with torch.no_grad(), handle.replay(seed):
    replayed = model(input_ids=tokens).last_hidden_state

# %%
# Every dot is one hidden value, and its height is the difference to the first pass.
figure, axes = plt.subplots(
    1, 2, figsize=(8, 4), layout="constrained", sharex=True, sharey=True
)
for axis, values, title in zip(
    axes, (replayed, another), ("replayed, in eval mode", "a new pass"), strict=True
):
    axis.scatter(first.flatten(), (values - first).flatten(), s=2)
    axis.set(
        title=f"{title}\nlargest difference {(values - first).abs().max():.1g}",
        xlabel="value in the first pass",
    )
axes[0].set_ylabel("difference")
plt.show()
