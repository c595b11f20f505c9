"""The mathematics once more, slowly: loops over samples, heads and rows, written from the formulas."""

import math

import torch


def attention(query, key, value, *, keep=None, valid=None, bias=None, scale=None, factor=None):
    """(B, H, Q, D) by loops. A row whose valid keys are all dropped is uniform; one without valid keys gives zeros."""
    batch, heads, queries, size = query.shape
    keys = key.shape[-2]
    full = (batch, heads, queries, keys)
    keep = torch.ones(full, dtype=torch.bool) if keep is None else keep.expand(full)
    valid = torch.ones(full, dtype=torch.bool) if valid is None else valid.expand(full)
    bias = torch.zeros(full, dtype=query.dtype) if bias is None else bias.expand(full)
    factor = torch.ones(full, dtype=query.dtype) if factor is None else factor.to(query.dtype).expand(full)
    scale = 1 / math.sqrt(size) if scale is None else scale
    samples = []
    for b in range(batch):
        per_head = []
        for h in range(heads):
            rows = []
            for i in range(queries):
                allowed = [j for j in range(keys) if valid[b, h, i, j]]
                kept = [j for j in allowed if keep[b, h, i, j]]
                row = torch.zeros(size, dtype=query.dtype)
                if kept:
                    scores = [scale * (query[b, h, i] * key[b, h, j]).sum() + bias[b, h, i, j] for j in kept]
                    top = max(float(s.detach()) for s in scores)
                    exps = [torch.exp(s - top) for s in scores]
                    total = sum(exps)
                    for j, e in zip(kept, exps, strict=True):
                        row = row + e / total * factor[b, h, i, j] * value[b, h, j]
                else:
                    for j in allowed:
                        row = row + value[b, h, j] / len(allowed) * factor[b, h, i, j]
                rows.append(row)
            per_head.append(torch.stack(rows))
        samples.append(torch.stack(per_head))
    return torch.stack(samples)


def gradients(output, *inputs):
    """Gradients of a fixed random projection of the output; zeros where there is no path."""
    if not output.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    torch.manual_seed(7)
    grads = torch.autograd.grad(
        (output * torch.randn(output.shape, dtype=output.dtype)).sum(), inputs, allow_unused=True, retain_graph=True
    )
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]


def assert_same(fast, slow, *inputs, tolerance=1e-12):
    """Outputs and gradients agree within the tolerance."""
    assert fast.shape == slow.shape
    assert (fast - slow).abs().max() < tolerance
    for ours, theirs in zip(gradients(fast, *inputs), gradients(slow, *inputs), strict=True):
        assert (ours - theirs).abs().max() < tolerance


def close(rate, p, n):
    """Whether the rate of n draws is within five standard errors of the probability."""
    return abs(float(rate) - p) <= 5 * math.sqrt(p * (1 - p) / n)
