"""
Dropout of hidden states
========================

``HiddenDropout`` changes the states between blocks instead of attention. It drops single values, whole features, or a
span of neighbouring tokens. The picture shows which values of one sample stay (dark).
"""

import matplotlib.pyplot as plt
import torch
from transformers import BertConfig, BertModel

import attnreg

torch.manual_seed(0)
site = attnreg.HiddenSite(shape=(1, 16, 32))
figure, axes = plt.subplots(1, 3, figsize=(10, 2.6), layout="constrained")
for axis, mode in zip(axes, ("element", "column", "span"), strict=True):
    states = attnreg.HiddenDropout(0.3, mode=mode)(site, torch.ones(1, 16, 32))
    axis.imshow(
        (states[0] != 0).numpy(), cmap="Blues", vmin=0, vmax=1.4, aspect="auto"
    )
    axis.set(title=f'mode="{mode}"', xlabel="feature", ylabel="token")
plt.show()

# %%
# It is attached like every regularizer, and composes with those of attention.
model = BertModel(
    BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
).train()
handle = attnreg.attach(model, attnreg.HiddenDropout(0.3) & attnreg.DropHead(0.2))
model(input_ids=torch.randint(1, 100, (8, 16)))
print(handle.report())
