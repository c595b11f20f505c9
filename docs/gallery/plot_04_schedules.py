"""
Schedules
=========

``Scheduled`` moves an argument of a regularizer along knots of (progress, value); ``BernoulliScheduleProvider`` gives
each layer a line of its own. The dots are measured on masks, the lines are what was asked for.
"""

import matplotlib.pyplot as plt
import torch

import attnreg

torch.manual_seed(0)
total = 100
v_shaped = [(0, 0.2), (0.5, 0.0), (1, 0.2)]
falling = [(0, 0.4), (1, 0.1)]
providers = {
    "DropHead, the paper's V": (
        attnreg.Scheduled(attnreg.DropHead(), total_steps=total, p=v_shaped),
        v_shaped,
    ),
    "scores, falling": (
        attnreg.BernoulliScheduleProvider(falling, total_steps=total),
        falling,
    ),
}

# %%
# A regularizer needs no model: ask it for the mask of a site. ``step`` follows each optimizer step.
site = attnreg.AttentionSite(shape=(64, 12, 16, 16))
plt.figure(figsize=(7, 3.5), layout="constrained")
for (label, (provider, knots)), color in zip(
    providers.items(), ("tab:blue", "tab:orange"), strict=True
):
    steps, rates = [], []
    for step in range(total + 1):
        if step % 5 == 0:
            mask = provider(site)
            factors = mask.scores if mask.scores is not None else mask.weights
            steps.append(step)
            rates.append(float((factors == 0).float().mean()))
        provider.step()
    plt.plot(
        [total * progress for progress, _ in knots],
        [p for _, p in knots],
        color=color,
        label=label,
    )
    plt.plot(steps, rates, "o", color=color, markersize=4)
plt.xlabel("optimizer step")
plt.ylabel("drop rate")
plt.legend()
plt.show()
