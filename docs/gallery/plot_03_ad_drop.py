"""
AD-DROP's candidates on a sentence
==================================

AD-DROP attributes the prediction to the attention weights. In each row, the keys with the highest attribution are the
candidates, and each of them is dropped with probability q. Here, a tiny BERT learns that a sentence is negative if it
contains "not"; then we look at one sentence.
"""

import matplotlib.pyplot as plt
import torch
from transformers import BertConfig, BertForSequenceClassification

import attnreg
from attnreg.training import FineTuning, adamw

torch.manual_seed(0)
words = ["[CLS]", "the", "film", "was", "not", "good", "and", "long", "very", "new"]
config = BertConfig(
    vocab_size=10,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)
model = BertForSequenceClassification(config)

method = FineTuning(model, adamw(model, 3e-3))
# not to the end: a prediction that is too sure has no gradient left
for _ in range(40):
    ids = torch.randint(1, 10, (32, 8))
    ids[:, 0] = 0
    loss = method.step(
        {"input_ids": ids, "labels": (ids == words.index("not")).any(1).long()}
    ).loss
print(f"loss: {loss:.3f}")

# %%
# The first pass attributes; the second one, in training mode, drops.
sentence = ["[CLS]", "the", "film", "was", "not", "very", "good"]
batch = {
    "input_ids": torch.tensor([[words.index(word) for word in sentence]]),
    "labels": torch.tensor([1]),
}
provider = attnreg.AttributionProvider(p=0.3, q=0.5)
masks = []
provider.register_forward_hook(lambda module, sites, mask: masks.append(mask.scores))
attnreg.attach(model, provider)
provider.attribute(model, batch)
attribution = provider.attributions["encoder.0"][0, 0]
candidates = attnreg.functional.candidate_region(
    provider.attributions["encoder.0"],
    torch.ones(1, 1, 7, 7, dtype=torch.bool),
    p=0.3,
)[0, 0]
_ = model.train()(**batch)

# %%
# The first head of layer 0. Each row of attributions is divided by its largest value, because candidates are chosen row
# by row. Red keys speak for the prediction, blue ones against it.
figure, axes = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained")
rows = attribution / attribution.abs().amax(1, keepdim=True)
axes[0].imshow(rows.numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
axes[1].imshow(candidates.numpy(), cmap="Oranges", vmin=0, vmax=1.3)
axes[2].imshow(~masks[0][0, 0].numpy(), cmap="Greys", vmin=0, vmax=1.3)
for axis, title in zip(axes, ("attribution", "candidates", "dropped"), strict=True):
    axis.set(title=title, xlabel="key")
    axis.set_xticks(range(7), sentence, rotation=60)
    axis.set_yticks(range(7), sentence)
plt.show()
