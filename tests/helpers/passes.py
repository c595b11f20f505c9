"""Passes of a model: outputs and gradients under a seed, alone and in checkpoints, and what a model looks like from outside."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.injection.attachment import handles
from tests.helpers.cases import MODELS, output

models = pytest.mark.parametrize("case", MODELS, ids=str)


def without_dropout(model):
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (isinstance(module, nn.Dropout) or "drop" in name):
                setattr(module, name, 0.0)


def wrap_in_checkpoints(case, model):
    for block in case.blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def unwrap(case, model):
    for block in case.blocks(model):
        block.forward = block.forward.args[0]


class Traces:
    """What a model looks like from outside, to be compared before and after."""

    def __init__(self, model):
        self.keys = list(model.state_dict())
        self.parameters = [(name, id(p)) for name, p in model.named_parameters()]
        self.classes = [(name, type(m)) for name, m in model.named_modules()]
        self.modes = [m.training for m in model.modules()]
        self.requires_grad = [p.requires_grad for p in model.parameters()]
        self.attributes = [sorted(vars(m)) for m in model.modules()]
        self.hooks = [
            [list(getattr(m, kind)) for kind in vars(m) if "hooks" in kind and getattr(m, kind) is not None]
            for m in model.modules()
        ]


def run(model, batch, seed=3):
    """Output and gradients under a seed."""
    model.zero_grad()
    for handle in handles(model):
        handle.provider.attribute(model, batch)  # some look at the batch first; the others do nothing
    torch.manual_seed(seed)
    out = output(model, batch)
    torch.manual_seed(seed)
    loss = (out * torch.randn_like(out)).sum()
    for handle in handles(model):
        penalty = handle.provider.penalty()
        loss = loss if penalty is None else loss + penalty
    loss.backward()
    return out, [p.grad for p in model.parameters()]


def same(a, b):
    return torch.equal(a[0], b[0]) and all(x is y is None or torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def checkpointed(case, make, seed=3):
    """What a model gives attached; with its blocks in checkpoints within the attached model, and around it."""
    model, batch = case.build(), case.batch()
    provider = make(model)
    with attnreg.attach(model, provider):
        expected = run(model, batch, seed)
        wrap_in_checkpoints(case, model)
        within = run(model, batch, seed)
        unwrap(case, model)
    wrap_in_checkpoints(case, model)
    with attnreg.attach(model, provider):
        return expected, within, run(model, batch, seed)


class Recorder(attnreg.MaskProvider):
    def __init__(self):
        super().__init__()
        self.sites = []
        self.prepared = []

    def forward(self, site):
        self.sites.append(site)

    def prepare(self, inputs):
        self.prepared.append(dict(inputs))


def under_both_kernels(case, provider, *, std=None, **where):
    """A plain output, and outputs and gradients under a provider, of attention that is fused and written out."""
    model, batch = case.build().double(), case.batch()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    without_dropout(model)
    for weight in model.parameters():
        if std is not None and weight.dim() > 1:
            nn.init.normal_(weight, std=std)
    plain, found = output(model, batch), []
    for kernel in ("sdpa", "eager"):
        model.set_attn_implementation(kernel)
        with attnreg.attach(model, provider, stacks=list(case.stacks), **where):
            found.append(run(model, batch))
    return plain, *found


class Recomputing(torch.autograd.Function):
    """A checkpoint of another library."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return None, torch.autograd.grad(ctx.run(x), x, grad)[0]
