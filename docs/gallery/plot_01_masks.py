"""
Attach a provider and look at its masks
=======================================

Attach regularizers to a tiny BERT, one after the other, and draw what one training pass drops in the first head.
White is dropped. ``DropKey`` drops whole keys here, ``DropHead`` whole heads.
"""

import matplotlib.pyplot as plt
import torch
from transformers import BertConfig, BertModel

import attnreg

torch.manual_seed(0)
model = BertModel(BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).train()
tokens = torch.randint(1, 100, (1, 16))

providers = {
    "AttentionDropout": attnreg.AttentionDropout(0.3, placement="scores"),
    "DropKey": attnreg.DropKey(0.3, share_queries=True),
    "DropAttention": attnreg.DropAttention(0.3, window=3),
    "DropHead": attnreg.DropHead(0.5),
}

# %%
# A provider is an ``nn.Module``, so a forward hook sees the mask of each layer.
figure, axes = plt.subplots(2, 4, figsize=(10, 5.4), layout="constrained")
for column, (name, provider) in zip(axes.T, providers.items(), strict=True):
    masks = []
    provider.register_forward_hook(lambda module, sites, mask, masks=masks: masks.append(mask))
    with attnreg.attach(model, provider) as handle:
        model(input_ids=tokens)
        rates = handle.drop_rates()
    for layer, (axis, mask) in enumerate(zip(column, masks, strict=True)):
        factors = next(each for each in (mask.scores, mask.weights, mask.normalized) if each is not None)
        axis.imshow((factors != 0).expand(1, 4, 16, 16)[0, 0].numpy(), cmap="Blues", vmin=0, vmax=1.4)
        axis.set_title(f"{name}, layer {layer}\n{rates[f'encoder.{layer}']:.0%} dropped in all heads", fontsize=8)
        axis.set(xticks=[], yticks=[], xlabel="key", ylabel="query")
plt.show()
