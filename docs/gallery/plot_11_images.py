"""
A Vision Transformer on a folder of images
==========================================

A tiny ViT learns whether a bright bar is horizontal or vertical, with DropKey on its patches. It reads a folder with a
subfolder of images for each class, as ``datasets`` does. The picture shows which patches the class token attends to.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from datasets import disable_progress_bars, load_dataset
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

import attnreg
from attnreg.training import FineTuning, adamw

torch.manual_seed(0)
noise = np.random.default_rng(0)
folder = Path(tempfile.mkdtemp())
for number in range(300):
    label = ("horizontal", "vertical")[number % 2]
    pixels = noise.integers(0, 100, (16, 16, 3), dtype=np.uint8)
    at = noise.integers(0, 16)
    pixels[(at, slice(None)) if label == "horizontal" else (slice(None), at)] = 255
    (folder / label).mkdir(exist_ok=True)
    Image.fromarray(pixels).save(folder / label / f"{number}.png")

# %%
# Read the folder and train. ``DropKey`` drops whole patches for all queries of a head.
disable_progress_bars()
rows = load_dataset(
    "imagefolder",
    data_dir=str(folder),
    split="train",
    cache_dir=str(folder / "cache"),
).shuffle(seed=0)
pixel_values = (
    torch.from_numpy(np.stack(rows["image"])).permute(0, 3, 1, 2) / 127.5 - 1
)
labels = torch.tensor(rows["label"])
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
model = ViTForImageClassification(
    ViTConfig(image_size=16, patch_size=4, attn_implementation="eager", **sizes)
)
method = FineTuning(
    model, adamw(model, 1e-3), attnreg.DropKey(0.1, share_queries=True)
)
for _ in range(10):
    for chosen in torch.randperm(200).split(20):
        method.step({"pixel_values": pixel_values[chosen], "labels": labels[chosen]})

# %%
# In eval mode nothing is dropped. The model sees 4 x 4 patches; bright ones get more attention.
model.eval()
with torch.no_grad():
    output = model(pixel_values[200:], output_attentions=True)
right = output.logits.argmax(-1) == labels[200:]
print(f"{right.float().mean():.0%} of 100 held-out images are right")
# mean over layers and heads
attention = torch.stack(output.attentions).mean((0, 2))[:, 0, 1:].reshape(-1, 4, 4)

figure, axes = plt.subplots(2, 5, figsize=(9, 4), layout="constrained")
for (above, below), image, patches, mark in zip(
    axes.T, pixel_values[200:], attention, right, strict=False
):
    above.imshow((image.permute(1, 2, 0) + 1) / 2)
    below.imshow(patches, cmap="viridis")
    above.set_title("right" if mark else "wrong", fontsize=9)
    above.set(xticks=[], yticks=[])
    below.set(xticks=[], yticks=[])
axes[0, 0].set_ylabel("image")
axes[1, 0].set_ylabel("class token's\nattention")
plt.show()
