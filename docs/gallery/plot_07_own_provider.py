"""
A regularizer of your own
=========================

A regularizer is one class with one method: it takes a site and returns a mask. This one drops far keys more often than
near ones. It can be attached to any model, composed and scheduled like the built-in ones.
"""

import matplotlib.pyplot as plt
import torch

import attnreg


class DropFar(attnreg.MaskProvider):
    """Drop a key with a probability that grows with its distance to the query."""

    schedulable = ("p",)

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, site):
        queries, keys = (
            torch.arange(size, device=site.device) for size in site.shape[2:]
        )
        distance = (queries[:, None] - keys).abs() / max(site.shape[3] - 1, 1)
        return attnreg.Mask(scores=site.uniform() >= self.p * distance)


# %%
# Left: one mask. Right: how often a query of the middle and of the end keep each key.
torch.manual_seed(0)
provider = DropFar(0.8)
kept = provider(attnreg.AttentionSite(shape=(500, 4, 24, 24))).scores
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
axes[0].imshow(kept[0, 0].numpy(), cmap="Blues", vmin=0, vmax=1.4)
axes[0].set(xlabel="key", ylabel="query", title="one mask (white = dropped)")
for query in (12, 23):
    axes[1].plot(
        kept.float().mean((0, 1))[query], "o-", markersize=3, label=f"query {query}"
    )
axes[1].set(xlabel="key", ylabel="share of masks that keep it", ylim=(0, 1.05))
axes[1].legend()
plt.show()

# %%
# Check it on a tiny model before you train: masks act in training mode only, a replay repeats them, and a saved
# regularizer comes back. To load a regularizer of your own, name its class.
import tempfile

from transformers import BertConfig, BertModel

ids = torch.randint(1, 100, (4, 24))
sizes = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = BertModel(
    BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
).eval()
plain = model(ids).last_hidden_state
handle = attnreg.attach(model, provider)
assert torch.equal(model(ids).last_hidden_state, plain)  # eval mode: the plain model
masked = model.train()(ids).last_hidden_state
print(handle.report())  # is this the rate that you expect?
assert not torch.equal(masked, plain)
with handle.replay():
    assert torch.equal(model(ids).last_hidden_state, masked)
with tempfile.TemporaryDirectory() as folder:
    provider.save_pretrained(folder)
    print(attnreg.Regularizer.from_pretrained(folder, providers=[DropFar]))
