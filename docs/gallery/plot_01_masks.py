"""
Attach a regularizer and look at its masks
==========================================

Attach regularizers to a tiny BERT, one after the other, and draw what one training pass drops in the four heads of each
layer. White is dropped. ``DropKey`` drops whole keys here, ``DropAttention`` windows of keys, ``DropHead`` whole heads.
"""

import matplotlib.pyplot as plt
import torch
from transformers import BertConfig, BertModel

import attnreg

torch.manual_seed(1)
model = BertModel(
    BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
).train()
tokens = torch.randint(1, 100, (1, 16))

providers = {
    "AttentionDropout": attnreg.AttentionDropout(0.3, placement="scores"),
    "DropKey": attnreg.DropKey(0.3, share_queries=True),
    "DropAttention": attnreg.DropAttention(0.3, window=3),
    "DropHead": attnreg.DropHead(0.5),
}

# %%
# A regularizer is an ``nn.Module``, so a forward hook sees the mask of each layer.
figure, axes = plt.subplots(2, 4, figsize=(10, 5.4), layout="constrained")
for column, (name, provider) in zip(axes.T, providers.items(), strict=True):
    masks = []
    provider.register_forward_hook(
        lambda module, sites, mask, masks=masks: masks.append(mask)
    )
    with attnreg.attach(model, provider) as handle:
        model(input_ids=tokens)
        rates = handle.drop_rates()
    for layer, (axis, mask) in enumerate(zip(column, masks, strict=True)):
        heads = mask.units_kept.expand(1, 4, 16, 16)[0]
        tiles = torch.cat(
            [torch.cat([heads[0], heads[1]], 1), torch.cat([heads[2], heads[3]], 1)]
        )
        axis.imshow(tiles.numpy(), cmap="Blues", vmin=0, vmax=1.4)
        axis.axhline(15.5, color="black", linewidth=0.8)
        axis.axvline(15.5, color="black", linewidth=0.8)
        axis.set_title(
            f"{name}, layer {layer}\n{rates[f'encoder.{layer}']:.0%} dropped",
            fontsize=8,
        )
        axis.set(xticks=[], yticks=[], xlabel="key, head by head", ylabel="query")
plt.show()
