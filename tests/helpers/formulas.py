"""Formulas, written as slow loops."""

import math

import numpy as np
import torch


def slow_region(attribution, valid, p, region):
    """By the definition: sort, look up the value at a rank; the high region is at or above it, the low one below it."""
    result = torch.zeros(attribution.shape, dtype=torch.bool)
    for b, h, i in np.ndindex(*attribution.shape[:3]):
        keys = [j for j in range(attribution.shape[3]) if valid[b, h, i, j]]
        values = [float(attribution[b, h, i, j]) for j in keys]
        n = len(keys)
        rank = math.floor((1 - p if region == "high" else p) * n)
        if len(set(values)) < 2 or (region == "high" and rank == n):
            continue
        threshold = ([*sorted(values), math.inf])[rank]
        for j, value in zip(keys, values, strict=True):
            result[b, h, i, j] = value >= threshold if region == "high" else value < threshold
    return result


def slow_symmetric_kl(a, b):
    """Of softmax distributions with these logits, averaged over rows."""
    total = 0.0
    for row_a, row_b in zip(a.tolist(), b.tolist(), strict=True):
        p = [math.exp(x) / sum(map(math.exp, row_a)) for x in row_a]
        q = [math.exp(x) / sum(map(math.exp, row_b)) for x in row_b]
        there = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
        back = sum(y * math.log(y / x) for x, y in zip(p, q, strict=True))
        total += (there + back) / 2
    return total / len(a)
