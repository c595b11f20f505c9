"""
Compare methods over seeds
==========================

One run tells little: seeds differ more than methods do. ``attnreg compare`` gives every method the same seeds and
writes ``results.csv``. This script reads a stored one, of 24 seeds on 500 rows of SST-2, and compares the methods
seed by seed.
"""

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import attnreg

# of a clone
path = (
    Path(attnreg.__file__).parent.parent
    / "docs"
    / "results"
    / "mechanism"
    / "results.csv"
)
scores = defaultdict(dict)
with path.open(encoding="utf-8") as file:
    for row in csv.DictReader(file):
        if row["role"] == "final":
            scores[row["method"]][int(row["seed"])] = float(row["score"])
seeds = sorted(set.intersection(*(set(each) for each in scores.values())))
table = {
    method: np.array([each[seed] for seed in seeds])
    for method, each in scores.items()
}
print(
    {
        method: f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"
        for method, values in table.items()
    }
)

# %%
# Left: each line is a seed. Right: differences to plain fine-tuning on the same seed, with their means.
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
axes[0].plot(np.array(list(table.values())), color="grey", alpha=0.4)
axes[0].plot([values.mean() for values in table.values()], "ko-", linewidth=2)
axes[0].set_xticks(range(len(table)), table, rotation=30)
axes[0].set_ylabel("accuracy on dev")
others = [method for method in table if method != "plain"]
for place, method in enumerate(others):
    gaps = 100 * (table[method] - table["plain"])
    axes[1].scatter(
        np.full(len(gaps), place) + np.linspace(-0.15, 0.15, len(gaps)), gaps, s=12
    )
    axes[1].hlines(gaps.mean(), place - 0.3, place + 0.3, color="black")
axes[1].axhline(0, color="grey", linestyle=":")
axes[1].set_xticks(range(len(others)), others, rotation=30)
axes[1].set_ylabel("points above plain, same seed")
plt.show()
